"""Several ranks of one engine in one sandbox: a host process each, and one end for all of them.

The first process forks the ranks and watches: it runs no engine. Rank 0 hears the parent, passes
each command on before it carries it out itself, and answers for all; the others take commands from
it alone. Stands alone, like host.py.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
GRACE_S = 5.0  # in which rank 0 may say itself that it misses another
Link = tuple[int, int]  # of rank 0 with another: where commands are written, where answers come


def split(settings: dict[str, Any]) -> dict[str, Any]:
    """Fork one process per rank; returns in the ranks alone, each with settings of its own.

    A rank finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment, as
    torch.distributed names them.
    """
    world, port = settings["world"], _free_port()
    if settings["device"] == "cpu":
        import torch  # noqa: F401 - once for all ranks; a GPU's driver does not survive a fork
    commands = [(settings["commands"], -1), *(os.pipe() for _ in range(1, world))]
    results = [(-1, settings["results"]), *(os.pipe() for _ in range(1, world))]
    ranks: dict[int, int] = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            os.environ.update(_environment(rank, world, port))
            return settings | {"rank": rank} | _ends(rank, commands, results)
        ranks[pid] = rank
    for fd in _all(commands, results) - {settings["results"]}:  # the parent hears of an end last
        os.close(fd)
    _watch(ranks, world)


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {name: str(value) for name, value in named.items()} | loopback | {
        "MASTER_ADDR": "127.0.0.1"
    }  # fmt: skip


def _ends(rank: int, commands: list[Link], results: list[Link]) -> dict[str, Any]:
    """The descriptors that a rank keeps; all others are closed in it."""
    own = {"commands": commands[rank][0], "results": results[rank][1], "links": []}
    if rank == 0:
        pairs = zip(commands[1:], results[1:], strict=True)
        own["links"] = [(tell, hear) for (_, tell), (hear, _) in pairs]
    kept = {own["commands"], own["results"], *(fd for link in own["links"] for fd in link)}
    for fd in _all(commands, results) - kept:
        os.close(fd)
    return own


def _all(*pipes: list[Link]) -> set[int]:
    return {fd for ends in pipes for pair in ends for fd in pair if fd >= 0}


def _watch(ranks: dict[int, int], world: int) -> NoReturn:
    """Until the first rank ends: give rank 0 time to end as well, then end all and say who went."""
    pid, status = os.waitpid(-1, 0)
    first, statuses = ranks.pop(pid), [status]
    deadline = time.monotonic() + (GRACE_S if first else 0.0)
    while ranks and 0 in ranks.values() and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid and ranks.pop(pid) == 0:
            statuses.append(status)
        time.sleep(0.02)
    orderly = 0 not in ranks.values() and not any(statuses)
    for pid in ranks:
        os.kill(pid, signal.SIGTERM if orderly else signal.SIGKILL)
        os.waitpid(pid, 0)
    if not orderly:
        code = os.waitstatus_to_exitcode(statuses[0])
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        print(f"rank {first} of {world} was lost ({how})", file=sys.stderr, flush=True)
    os._exit(0 if orderly else 1)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]

"""A nursery: one confined process that has imported torch and forks hosts that start at once.

It never runs an engine's code itself: each host is a fork of it that imports the engine, and all
that a host started is gone when the host has ended.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metainfer_lab import wire
from metainfer_lab.sandbox import Confined, Level, Tail

HOST = Path(__file__).with_name("host.py")
# all of ours that a host reads
HOST_FILES = [HOST, HOST.with_name("ranks.py"), HOST.with_name("pairs.py"), Path(wire.__file__)]
START_S = 60.0


class Nursery:
    """A context manager; `fork` gives one host at a time, which may read `readable`."""

    def __init__(self, level: Level, readable: Sequence[Path], threads: int | None = None):
        self.level = level
        self.readable = [*HOST_FILES, *readable]
        self.threads = threads
        self.numbers = itertools.count()

    def __enter__(self) -> Nursery:
        self.channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(START_S)
        with other:
            self.confined = Confined(
                ["python", "-I", "-S", str(HOST)],
                settings={"nursery": other.fileno()},
                level=self.level,
                readable=self.readable,
                pass_fds=(other.fileno(),),
                threads=self.threads,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.confined.end()

    def fork(self, settings: dict[str, Any], commands: int, results: int) -> Forked:
        """A host that serves an engine over two pipes; its other settings as for `Confined`."""
        heard, said = os.pipe()
        log = Tail(os.fdopen(heard, "rb"))
        settings = settings | {"scratch": str(self.confined.scratch / f"host-{next(self.numbers)}")}
        try:
            fds = [commands, results, said]
            socket.send_fds(self.channel, [json.dumps(settings).encode()], fds)
        except BrokenPipeError:  # an earlier engine has ended the nursery
            self.__exit__()
            self.__enter__()
            return self.fork(settings, commands, results)
        finally:
            os.close(said)
        return Forked(self, log)

    def end_hosts(self) -> None:
        """End the host and whatever it started; all of it, where an engine ended the nursery."""
        try:
            self.channel.send(b"end")
            self.channel.recv(16)
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.confined.end()


class Forked:
    """A host forked by a nursery, as `EngineProcess` knows it: its last words, and its end."""

    def __init__(self, nursery: Nursery, stderr: Tail):
        self.nursery = nursery
        self.stderr = stderr

    def end(self) -> None:
        """End it now."""
        self.nursery.end_hosts()
        self.stderr.join()

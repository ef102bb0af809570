"""A baseline in a process of its own: JSON lines over pipes, a process group that dies with us."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from select import select
from types import TracebackType

from metainfer_lab.paths import ROOT


class WorkerError(RuntimeError):
    """A baseline's process died, or said nothing for too long."""


class Worker:
    """`python -m module` that answers one JSON line for each; a context manager.

    The child keeps its protocol on descriptors of its own, so that what a library prints is no
    answer. Death and silence are errors that carry the last lines it wrote.
    """

    def __init__(self, module: str, timeout_s: float = 300.0) -> None:
        self.module, self.timeout_s = module, timeout_s

    def __enter__(self) -> Worker:
        self.stderr = tempfile.TemporaryFile("w+")
        requests, self._to_child = os.pipe()
        self._from_child, replies = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, str(requests), str(replies)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self.stderr,
            stderr=self.stderr,
            pass_fds=(requests, replies),
            start_new_session=True,
        )
        os.close(requests)
        os.close(replies)
        self.replies = os.fdopen(self._from_child, "rb", buffering=0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._to_child)
        self.replies.close()
        self.stderr.close()

    def send(self, **request: object) -> None:
        """Hand over one request."""
        with contextlib.suppress(BrokenPipeError):  # receive() tells why the child is gone
            os.write(self._to_child, (json.dumps(request) + "\n").encode())

    def receive(self) -> dict:
        """The next answer; WorkerError when the child died, or said nothing for `timeout_s`."""
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select([self.replies], [], [], self.timeout_s)
            chunk = self.replies.readline() if ready else b""
            if not chunk:
                raise WorkerError(f"{self.module} {self._fate(bool(ready))}")
            line += chunk
        return json.loads(line)

    def call(self, **request: object) -> dict:
        """One request and its answer."""
        self.send(**request)
        return self.receive()

    def _fate(self, ended: bool) -> str:
        if ended:  # its pipe closes before its traceback is written
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)
        self.stderr.seek(0)
        said = " | ".join(self.stderr.read().strip().splitlines()[-3:]) or "nothing"
        fate = "died" if ended else f"was silent for {self.timeout_s:g} s"
        return f"{fate}; it last said: {said}"


def serve(handler: Callable[[dict], Iterator[dict]]) -> None:
    """The child's side: answer requests until the parent is gone."""
    requests, replies = (int(fd) for fd in sys.argv[1:3])
    with os.fdopen(requests) as source, os.fdopen(replies, "w", buffering=1) as sink:
        for line in source:
            for answer in handler(json.loads(line)):
                sink.write(json.dumps(answer) + "\n")

"""An engine at arm's length: `EngineProcess` starts the confined host and speaks with it."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from metainfer_lab import wire
from metainfer_lab.engine.manifest import is_recorded
from metainfer_lab.engine.nursery import HOST, HOST_FILES, Forked, Nursery
from metainfer_lab.sandbox import Confined, Sandbox, choose

if TYPE_CHECKING:
    import psutil

DEFAULT_TIMEOUT_S = 120.0
WHILE_SPINNING = frozenset({"submit", "cancel", "stats"})


class EngineError(Exception):
    """The engine raised: `type` is the exception's name, `text` its message, `trace` its end."""

    def __init__(self, type: str, text: str, trace: str = ""):
        super().__init__(f"{type}: {text}")
        self.type = type
        self.text = text
        self.trace = trace


class EngineDied(Exception):
    """The host process ended, hung past its time, or spoke nonsense."""


class StepResult(NamedTuple):
    """One token of one request; finish_reason: None | "stop" | "length"."""

    request: int
    token: int
    logprob: float
    top_logprobs: list[tuple[int, float]] | None
    finish_reason: str | None


class Arrival(NamedTuple):
    """What one `step` of a running host gave, and when the parent saw it (time.perf_counter)."""

    seconds: float
    results: list[StepResult]


class Surroundings(NamedTuple):
    """Top-level names of all imported modules; names in `time` that are no longer its own; how many
    processes the engine has started and not ended."""

    modules: list[str]
    clocks: list[str]
    children: int


class Census(NamedTuple):
    """What is alive in an engine's process. objects: those that Python's collector knows; tensors,
    and bytes of their storages; device_reserved: bytes that torch holds of the GPU."""

    objects: int
    tensors: int
    tensor_bytes: int
    device_reserved: int


class EngineProcess:
    """A context manager over one host process and the engine that it has loaded.

    The first checkpoint is loaded on entry; `load` replaces it by another below `readable`.
    timeout_s: the longest that any single answer may take; threads: of OpenMP in the process, None
    leaves the machine's number; nursery: forks the process, with its own rung, files and threads;
    compiled: where it keeps kernels, as for `Confined`; world: ranks of the engine, one process
    each, on the GPUs 0, 1, … if on any.
    """

    def __init__(
        self,
        folder: Path | str,
        checkpoint: Path | str | None,
        *,
        device: str = "cpu",
        max_batch: int = 4,
        max_context: int = 256,
        cache_bytes: int | None = None,
        sandbox: Sandbox = "auto",
        readable: Sequence[Path] = (),
        timeout_s: float = DEFAULT_TIMEOUT_S,
        threads: int | None = None,
        nursery: Nursery | None = None,
        compiled: Path | None = None,
        world: int = 1,
    ):
        self.folder = Path(folder).resolve()
        self.checkpoint = checkpoint
        self.settings = dict(
            device=device, max_batch=max_batch, max_context=max_context, cache_bytes=cache_bytes
        )
        self.world = world
        self.nursery = nursery
        trusted = is_recorded(self.folder)
        self.level = nursery.level if nursery else choose(sandbox, trusted=trusted)
        if self.sockets:  # a nursery's own policy has none
            self.nursery = None
        self.readable = [self.folder, *HOST_FILES, *readable]
        if checkpoint is not None:
            self.readable.append(Path(checkpoint).resolve())
        self.timeout_s = timeout_s
        self.threads = threads
        self.compiled = compiled
        self.confined: Confined | Forked | None = None
        self._spinning = False
        self._submitted_late = False
        self._pending: deque[Arrival | None] = deque()

    def __enter__(self) -> EngineProcess:
        self._start()
        try:
            if self.checkpoint is not None:
                self.load(self.checkpoint)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.kill()

    def load(self, checkpoint: Path | str, **changed: Any) -> None:
        """Load a checkpoint in place of the present one; `changed` overrides the settings once."""
        self._call("load", checkpoint=str(Path(checkpoint).resolve()), **self.settings | changed)

    @overload
    def score(self, tokens: Sequence[int], positions: Sequence[int]) -> np.ndarray: ...
    @overload
    def score(
        self, tokens: Sequence[int], positions: Sequence[int], *, routing: Literal[True]
    ) -> tuple[np.ndarray, np.ndarray]: ...
    def score(
        self, tokens: Sequence[int], positions: Sequence[int], *, routing: bool = False
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Logits [len(positions), V] as the engine gave them; with routing, expert ids too."""
        asked = {"tokens": _ints(tokens), "positions": _ints(positions), "routing": routing}
        answer = self._call("score", **asked)
        return (answer["logits"], answer["experts"]) if routing else answer["logits"]

    def submit(self, tokens: Sequence[int], params: dict[str, Any] | None = None) -> int:
        """Queue a request; its id."""
        return self._call("submit", tokens=_ints(tokens), params=params or {})["request"]

    def step(self) -> list[StepResult]:
        """One step of the engine."""
        return _results(self._call("step"))

    def cancel(self, request: int) -> None:
        """Give a request up."""
        self._call("cancel", request=request)

    def stats(self) -> dict[str, Any]:
        """The engine's own counters."""
        return self._call("stats")["stats"]

    def operators(self) -> dict[str, dict[str, Any]] | None:
        """What the engine's OPERATORS are, as pairs.py describes them; None if it has none."""
        return self._call("operators")["operators"]

    def operate(self, how: Literal["apply", "compare"], **case: Any) -> dict[str, np.ndarray]:
        """Results of an operator by name: of one form on given arguments, or of two on its own."""
        answer = self._call(how, **case)
        return {name: value for name, value in answer.items() if isinstance(value, np.ndarray)}

    def watch(self) -> None:
        """Note from now on which kernels rank 0's GPU runs, for `launched`."""
        self._call("watch")

    def launched(self) -> list[str]:
        """Names of the kernels that ran since `watch`, as the profiler has them."""
        return self._call("launched")["kernels"]

    def mark(self) -> float | None:
        """Milliseconds of the clock of rank 0's GPU since the last mark, None for the first; each
        mark waits for all work of the GPU."""
        return self._call("mark")["ms"]

    @property
    def sockets(self) -> bool:
        """Whether the process may open any: ranks speak through them, and only bubblewrap gives
        them a network of their own."""
        return self.world > 1 and self.level != "bubblewrap"

    def census(self) -> Census:
        """What lives in the process of rank 0, after a garbage collection."""
        return Census(**self._call("census")["census"])

    def rank(self, rank: int = 0) -> psutil.Process:
        """The process of a rank, seen from outside; EngineDied when it is not there."""
        import psutil

        outermost = self.nursery.confined if self.nursery else self.confined
        if outermost is not None:
            first = psutil.Process(outermost.process.pid)
            for process in (first, *first.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.name() == f"rank{rank}":
                        return process
        raise EngineDied(f"{self.folder.name}: there is no process of rank {rank}")

    def resident_bytes(self) -> int:
        """Memory of rank 0's process alone that is not a file's, as the kernel counts it."""
        lines = Path(f"/proc/{self.rank().pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))

    def surroundings(self) -> Surroundings:
        """What the process has about it besides the engine."""
        return Surroundings(**self._call("surroundings")["surroundings"])

    def run(self) -> Iterator[Arrival]:
        """Let the host spin `step` until all requests are finished; leaving the loop stops it.

        Inside the loop `submit`, `cancel` and `stats` may be called; the spinning goes on.
        """
        self._spin()
        while True:
            arrival = self._pending.popleft() if self._pending else self._arrive()
            if arrival is None:
                if not self._submitted_late:
                    return
                self._spin()  # the host had come to rest just before that request
                continue
            try:
                yield arrival
            except GeneratorExit:
                self._stop()
                raise

    def finish(self) -> list[StepResult]:
        """All results until nothing is unfinished, by `run`."""
        return [result for arrival in self.run() for result in arrival.results]

    def answer(
        self, tokens: Sequence[int], params: dict[str, Any] | None = None
    ) -> list[StepResult]:
        """All results of one request, after which nothing is unfinished."""
        request = self.submit(tokens, params)
        return [result for result in self.finish() if result.request == request]

    def close(self) -> None:
        """Close the engine and let the process end by itself."""
        if self.confined is not None:
            self._call("exit")
            self.kill()

    def kill(self) -> None:
        """End the process and all it started, without asking."""
        confined, self.confined = self.confined, None
        if confined is None:
            return
        os.close(self._commands)
        os.close(self._results)
        confined.end()

    def _start(self) -> None:
        child_in, self._commands = os.pipe()
        self._results, child_out = os.pipe()
        settings = {"wire": str(wire.__file__), "folder": str(self.folder), "world": self.world}
        settings["device"] = self.settings["device"]
        try:
            if self.nursery is not None:
                self.confined = self.nursery.fork(settings, child_in, child_out)
            else:
                self.confined = self._confined(settings, child_in, child_out)
        finally:
            os.close(child_in)
            os.close(child_out)

    def _confined(self, settings: dict[str, Any], commands: int, results: int) -> Confined:
        return Confined(
            ["python", "-I", "-S", str(HOST)],
            settings=settings | {"commands": commands, "results": results},
            level=self.level,
            readable=self.readable,
            pass_fds=(commands, results),
            sockets=self.sockets,
            threads=self.threads,
            compiled=self.compiled,
        )

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        if self._spinning and operation not in WHILE_SPINNING:
            self._stop()
        spun = self._spinning
        self._send(operation, **arguments)
        while (message := self._receive()).get("of") != operation:
            self._pending.append(self._arrival(message))
        self._submitted_late |= spun and not self._spinning and operation == "submit"
        return _checked(message)

    def _spin(self) -> None:
        if not self._spinning:
            self._pending.clear()
            self._send("run")
        self._spinning, self._submitted_late = True, False

    def _arrive(self) -> Arrival | None:
        return self._arrival(self._receive())

    def _arrival(self, message: dict[str, Any]) -> Arrival | None:
        """What a spinning host sent; None when it came to rest."""
        seconds = time.perf_counter()
        if message.get("of") == "run":
            self._spinning = False
            _checked(message)
            return None
        return Arrival(seconds, _results(message))

    def _stop(self) -> None:
        """Bring the host to rest; what it still had to say is dropped, a failure included."""
        if self._spinning and self.confined is not None:
            self._send("stop")
            heard = False
            while self._spinning or not heard:
                message = self._receive()
                if message.get("of") == "stop":
                    heard = True
                    continue
                with contextlib.suppress(EngineError):
                    self._arrival(message)
        self._pending.clear()

    def _send(self, operation: str, **arguments: Any) -> None:
        if self.confined is None:
            raise EngineDied(f"{self.folder.name}: {operation} after the process has ended")
        try:
            wire.send(self._commands, {"op": operation, **arguments})
        except BrokenPipeError:
            self._died("ended")

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + self.timeout_s
        try:
            message = wire.receive(self._results, deadline)
        except EOFError:
            self._died("ended")
        except TimeoutError:
            self._died(f"gave no answer in {self.timeout_s:.0f} s")
        except (ValueError, KeyError, TypeError) as error:
            self._died(f"spoke nonsense ({error})")
        return message

    def _died(self, how: str) -> None:
        confined = self.confined
        self.kill()
        lines = confined.stderr.text().strip().splitlines()[-5:] if confined else []
        said = "; its last words: " + " | ".join(lines) if lines else ", silently"
        raise EngineDied(f"{self.folder.name}: the engine's process {how}{said}") from None


def _checked(message: dict[str, Any]) -> dict[str, Any]:
    if "error" in message:
        raise EngineError(message["error"], message["text"], message["trace"])
    return message


def _results(message: dict[str, Any]) -> list[StepResult]:
    return [
        StepResult(request, token, logprob, top and [(t, p) for t, p in top], finish)
        for request, token, logprob, top, finish in message["steps"]
    ]


def _ints(values: Sequence[int]) -> list[Any]:
    """Plain JSON numbers; what is no integer goes through as it is, for the engine to refuse."""
    return [int(v) if isinstance(v, int | np.integer) else v for v in values]

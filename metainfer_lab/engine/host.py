"""The process in which an engine lives: `python -I -S host.py SETTINGS`, one JSON argument.

It stands alone, like the engines it runs: standard library, numpy and what the engine imports. It
answers commands that arrive on one inherited pipe through another; whatever the engine prints goes
to a log that decides nothing. Nothing here knows what a right answer is.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import json
import os
import signal
import sys
import time
import traceback
from types import ModuleType
from typing import Any

PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 4, 15, 36
OF_ALL_RANKS = frozenset({"load", "score", "submit", "cancel", "step", "stats", "close", "exit"})
OF_ONE_MIND = frozenset({"submit", "cancel", "stats"})  # equal on all ranks, or their ways part
PRIVATE_FOLDERS = ("HOME", "TMPDIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
PRIVATE_FOLDERS += ("TORCHINDUCTOR_CACHE_DIR",)


def main(settings: dict[str, Any]) -> None:
    """Serve until the parent says close or its end of the pipe is gone."""
    sys.path.extend(settings["packages"])
    if "nursery" in settings:
        settings = nursery(settings["nursery"])
    if settings["world"] > 1:
        settings = _module("ranks", _beside("ranks.py")).split(settings)
    _call_itself(f"rank{settings.get('rank', 0)}")
    host = Host(_module("wire", settings["wire"]), settings)
    while host.serve_one():
        pass


def nursery(fd: int) -> dict[str, Any]:
    """Import what every engine imports, then fork at each message; returns in the forks alone.

    b"end" ends the forks with all they started, which this process adopts (subreaper); it cannot be
    traced (not dumpable). With its parent's end of the channel gone, it ends.
    """
    import ctypes
    import socket

    import torch  # noqa: F401

    control = ctypes.CDLL(None).prctl
    control(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    control(PR_SET_DUMPABLE, 0, 0, 0, 0)
    channel = socket.socket(fileno=fd)
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 1 << 16, 3)
        if message == b"end":
            _end_children()
            channel.send(b"ended")
        elif not message:
            sys.exit(0)
        elif os.fork() == 0:
            channel.close()
            control(PR_SET_DUMPABLE, 1, 0, 0, 0)
            settings = json.loads(message)
            _move_in(settings["scratch"], fds[2])
            return settings | {"commands": fds[0], "results": fds[1]}
        for inherited in fds:
            os.close(inherited)


def _move_in(scratch: str, log: int) -> None:
    """A fork's own folder for home, temporary files and compile caches, and its own log."""
    os.mkdir(scratch)
    shared = os.environ["HOME"]
    for name in PRIVATE_FOLDERS:
        os.environ[name] = os.environ[name].replace(shared, scratch, 1)
    os.setsid()
    os.chdir(scratch)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def _end_children() -> None:
    while children := _children():
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)


def _children() -> list[int]:
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/children") as file:
            found += map(int, file.read().split())
    return found


def _call_itself(name: str) -> None:
    """Set the name under which the parent finds this process."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def ran(watch: Any, device: str) -> list[str]:
    """Names of what a stopped profile saw on a device, from its raw events: for each of torch's own
    it builds an object and its place in a tree, which takes minutes for a million."""
    import torch

    kind = getattr(torch.autograd.DeviceType, device)
    events = watch.profiler.kineto_results.events()
    return sorted({event.name() for event in events if event.device_type() == kind})


class Host:
    """One engine package, at most one loaded engine; one rank of several, or the only one."""

    def __init__(self, wire: ModuleType, settings: dict[str, Any]):
        self.wire = wire
        self.commands = settings["commands"]
        self.results = settings["results"]
        self.folder = settings["folder"]
        self.world = settings["world"]
        self.rank = settings.get("rank", 0)
        self.links = settings.get("links", [])
        self.package: ModuleType | None = None
        self.engine: Any = None
        self.unfinished: set[int] = set()
        self.watch: Any = None
        self.mark: Any = None

    def serve_one(self) -> bool:
        """Answer one command; False when there is nothing more to serve."""
        try:
            command = self.wire.receive(self.commands)
        except EOFError:
            return False
        operation = command.pop("op")
        self._reply(operation, command)
        return operation != "exit"

    def _reply(self, operation: str, command: dict[str, Any]) -> None:
        """Carry out a command and send what came of it; "of" says which command it was."""
        if operation in OF_ALL_RANKS:
            self._tell(operation, command)
        try:
            answer = getattr(self, f"do_{operation}")(**command)
        except BaseException as error:  # SystemExit too: an engine does not get to leave quietly
            trace = "".join(traceback.format_exception(error)[-6:])
            answer = {"error": type(error).__name__, "text": str(error), "trace": trace}
        if operation == "step" and self.rank:  # nobody waits: an error is said by leaving
            if "error" in answer:
                print(f"rank {self.rank}: {answer['trace']}", file=sys.stderr, flush=True)
                os._exit(1)  # what exit handlers would wait for may be gone
            return
        if operation in OF_ALL_RANKS and operation != "step":
            answer = self._agreed(operation, answer)
        self.wire.send(self.results, answer | {"of": operation})

    def _tell(self, operation: str, command: dict[str, Any]) -> None:
        for tell, _ in self.links:
            with contextlib.suppress(BrokenPipeError):  # the engine itself will miss that rank
                self.wire.send(tell, command | {"op": operation})

    def _agreed(self, operation: str, answer: dict[str, Any]) -> dict[str, Any]:
        """Rank 0's answer, or an error if another rank's differs where it may not."""
        for rank, (_, hear) in enumerate(self.links, 1):
            try:
                other = self.wire.receive(hear)
            except EOFError:
                text = f"rank {rank} ended in {operation}"
                return {"error": "RankLost", "text": text, "trace": ""}
            other.pop("of")
            kinds = [one.get("error") for one in (answer, other)]
            differ = kinds[0] != kinds[1]
            if differ or (operation in OF_ONE_MIND and kinds[0] is None and answer != other):
                text = f"{operation}: rank {rank} answered {other}, rank 0 {answer}"
                return {"error": "RanksDisagree", "text": text[:2000], "trace": ""}
        return answer

    def do_load(self, **arguments: Any) -> dict[str, Any]:
        if self.package is None:
            self.package = _package("engine", self.folder)
        self.do_close()
        if self.world > 1:
            arguments |= {"rank": self.rank, "world": self.world}
            if arguments["device"] == "cuda":
                arguments["device"] = f"cuda:{self.rank}"
        self.engine = self.package.load(**arguments)
        return {}

    def do_score(self, tokens: list[int], positions: list[int], routing: bool) -> dict[str, Any]:
        answer = self.engine.score(tokens, positions, **({"routing": True} if routing else {}))
        if self.rank:  # rank 0's logits count
            return {}
        logits, experts = answer if routing else (answer, None)
        message = {"logits": _numpy(logits), "dtype": str(getattr(logits, "dtype", None))}
        return message if experts is None else message | {"experts": _numpy(experts)}

    def do_submit(self, tokens: list[int], params: dict[str, Any]) -> dict[str, Any]:
        bias = params.get("logit_bias")
        if isinstance(bias, dict):  # JSON has no integer keys
            params["logit_bias"] = {int(token): value for token, value in bias.items()}
        request = int(self.engine.submit(tokens, params))
        self.unfinished.add(request)
        return {"request": request}

    def do_cancel(self, request: int) -> dict[str, Any]:
        self.engine.cancel(request)
        self.unfinished.discard(request)
        return {}

    def do_step(self) -> dict[str, Any]:
        return {"steps": self._step()}

    def do_run(self) -> dict[str, Any]:
        """Spin `step` until no request is unfinished; commands may arrive meanwhile.

        The parent stamps the arrival of each message and is never in the way of a step.
        """
        stopped = False
        while self.unfinished and not stopped:
            self._tell("step", {})
            if steps := self._step():
                self.wire.send(self.results, {"steps": steps})
            while not stopped and self.wire.readable(self.commands):
                command = self.wire.receive(self.commands)
                operation = command.pop("op")
                stopped = operation == "stop"
                self._reply(operation, command)
        return {}

    def do_stop(self) -> dict[str, Any]:
        """Nothing to do: `do_run` ends on it, or had ended by itself."""
        return {}

    def do_stats(self) -> dict[str, Any]:
        return {"stats": self.engine.stats()}

    def do_census(self) -> dict[str, Any]:
        """What is alive: Python objects that can hold others, tensors, bytes of their storages."""
        import torch

        gc.collect()
        alive = gc.get_objects()
        tensors = [one for one in alive if issubclass(type(one), torch.Tensor)]
        storages = dict(map(_storage, tensors))
        reserved = torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0
        counts = {"objects": len(alive), "tensors": len(tensors), "device_reserved": reserved}
        return {"census": counts | {"tensor_bytes": sum(storages.values())}}

    def do_operators(self) -> dict[str, Any]:
        """What the engine's OPERATORS are; None if it has none."""
        operators = getattr(self.package, "OPERATORS", None)
        return {"operators": operators and self._pairs().described(operators)}

    def do_apply(self, name: str, form: str, **case: Any) -> dict[str, Any]:
        """One form of an operator on the parent's arguments."""
        arrays = {key[4:]: case.pop(key) for key in [*case] if key.startswith("arg ")}
        function = getattr(self.package.OPERATORS[name], form)
        return self._pairs().applied(function, arrays, **case)

    def do_compare(self, name: str, **case: Any) -> dict[str, Any]:
        """Both forms of an operator on arguments that it draws itself."""
        return self._pairs().both(self.package.OPERATORS[name], engine=self.engine, **case)

    def do_watch(self) -> dict[str, Any]:
        """Note from now on which kernels the GPU runs."""
        from torch.profiler import ProfilerActivity, profile

        self.watch = profile(activities=[ProfilerActivity.CUDA])
        self.watch.start()
        return {}

    def do_launched(self) -> dict[str, Any]:
        """Names of the kernels, copies and fills that ran since, those of CUDA graphs too."""
        import torch

        torch.cuda.synchronize()
        self.watch.stop()
        return {"kernels": ran(self.watch, "CUDA")}

    def do_mark(self) -> dict[str, Any]:
        """Once the GPU has no work left: milliseconds of its own clock since the last such mark."""
        import torch

        torch.cuda.synchronize()
        before, self.mark = self.mark, torch.cuda.Event(enable_timing=True)
        self.mark.record()
        self.mark.synchronize()
        return {"ms": before and before.elapsed_time(self.mark)}

    def _pairs(self) -> ModuleType:
        return sys.modules.get("pairs") or _module("pairs", _beside("pairs.py"))

    def do_surroundings(self) -> dict[str, Any]:
        """Top-level names of all that was imported, clocks that were replaced, child processes."""
        modules = sorted({name.partition(".")[0] for name in sys.modules})
        clocks = [name for name, one in vars(time).items() if inspect.isroutine(one)]
        clocks = [name for name in clocks if not inspect.isbuiltin(getattr(time, name))]
        found = {"modules": modules, "clocks": clocks, "children": len(_children())}
        return {"surroundings": found}

    def do_close(self) -> dict[str, Any]:
        engine, self.engine, self.unfinished = self.engine, None, set()
        if engine is not None:
            engine.close()
        return {}

    do_exit = do_close

    def _step(self) -> list[Any]:
        steps = [_result(result) for result in self.engine.step()]
        self.unfinished -= {step[0] for step in steps if step[4] is not None}
        return steps


def _result(result: Any) -> list[Any]:
    request, token, logprob, top, finish = result
    pairs = None if top is None else [[int(t), float(p)] for t, p in top]
    return [int(request), int(token), float(logprob), pairs, finish]


def _storage(tensor: Any) -> tuple[int, int]:
    """What tells a tensor's storage from others, and its bytes."""
    try:
        return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
    except NotImplementedError:  # an opaque one, as packed weights of a CPU library are
        return id(tensor), tensor.nbytes


def _numpy(tensor: Any) -> Any:
    import numpy as np

    return tensor if isinstance(tensor, np.ndarray) else tensor.detach().cpu().numpy()


def _beside(name: str) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), name)


def _module(name: str, path: str) -> ModuleType:
    return _execute(importlib.util.spec_from_file_location(name, path))


def _package(name: str, folder: str) -> ModuleType:
    """Import a folder as a package; the folder itself never comes onto the module path."""
    init = os.path.join(folder, "__init__.py")
    return _execute(
        importlib.util.spec_from_file_location(name, init, submodule_search_locations=[folder])
    )


def _execute(spec: Any) -> ModuleType:
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

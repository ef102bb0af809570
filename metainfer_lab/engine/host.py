"""The process in which an engine lives: `python -I -S host.py SETTINGS`, one JSON argument.

It stands alone, like the engines it runs: standard library, numpy and what the engine imports. It
answers commands that arrive on one inherited pipe through another; whatever the engine prints goes
to a log that decides nothing. Nothing here knows what a right answer is.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import traceback
from types import ModuleType
from typing import Any

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
PRIVATE_FOLDERS = ("HOME", "TMPDIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
PRIVATE_FOLDERS += ("TORCHINDUCTOR_CACHE_DIR",)


def main(settings: dict[str, Any]) -> None:
    """Serve until the parent says close or its end of the pipe is gone."""
    sys.path.extend(settings["packages"])
    if "nursery" in settings:
        settings = nursery(settings["nursery"])
    wire = _module("wire", settings["wire"])
    host = Host(wire, settings["commands"], settings["results"], settings["folder"])
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
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


class Host:
    """One engine package, at most one loaded engine."""

    def __init__(self, wire: ModuleType, commands: int, results: int, folder: str):
        self.wire = wire
        self.commands = commands
        self.results = results
        self.folder = folder
        self.package: ModuleType | None = None
        self.engine: Any = None
        self.unfinished: set[int] = set()

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
        try:
            answer = getattr(self, f"do_{operation}")(**command)
        except BaseException as error:  # SystemExit too: an engine does not get to leave quietly
            trace = "".join(traceback.format_exception(error)[-6:])
            answer = {"error": type(error).__name__, "text": str(error), "trace": trace}
        self.wire.send(self.results, answer | {"of": operation})

    def do_load(self, **arguments: Any) -> dict[str, Any]:
        if self.package is None:
            self.package = _package("engine", self.folder)
        self.do_close()
        self.engine = self.package.load(**arguments)
        return {}

    def do_score(self, tokens: list[int], positions: list[int], routing: bool) -> dict[str, Any]:
        answer = self.engine.score(tokens, positions, **({"routing": True} if routing else {}))
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

    def do_modules(self) -> dict[str, Any]:
        """Top-level names of all that was imported."""
        return {"modules": sorted({name.partition(".")[0] for name in sys.modules})}

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


def _numpy(tensor: Any) -> Any:
    import numpy as np

    return tensor if isinstance(tensor, np.ndarray) else tensor.detach().cpu().numpy()


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

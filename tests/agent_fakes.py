"""Gates that a test can foresee: an engine passes when its __init__.py says `good`."""

from __future__ import annotations

import json
import threading
import time

from pydantic import BaseModel

from metainfer_lab.agent import generation, providers
from metainfer_lab.agent import run as runs
from metainfer_lab.agent.tools import EDITOR, Judge
from metainfer_lab.paths import tree_hash, write_atomic

SPEC = "smollm2-135m-fp32-cpu"
GATES = ("alone", "logits", "decode")


def isolate(monkeypatch, tmp_path):
    """Runs and records in a folder of the test's own; no checkpoint is fetched."""
    local, recorded = tmp_path / "local", tmp_path / "recorded"
    local.mkdir()
    recorded.mkdir()
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    monkeypatch.setattr(runs, "LOCAL_RUNS", local)
    monkeypatch.setattr(runs, "RUNS", recorded)
    monkeypatch.setattr(runs, "ENGINES", tmp_path / "engines")
    monkeypatch.setattr(generation, "checkpoint_of", lambda spec: checkpoint)
    monkeypatch.setattr(providers, "SETTLED_S", 0.0)
    monkeypatch.setattr(providers, "POLL_S", 0.02)
    return local


class Failure(BaseModel):
    case: str
    position: int | None = None
    error: float | None = None
    tolerance: float | None = None
    layer: str | None = None
    detail: str = ""


class GateVerdict(BaseModel):
    gate: str
    version: int = 1
    status: str
    passed: bool
    cases: int = 3
    worst_error: float | None = 0.1
    tolerance: float | None = 1e-4
    reason: str = ""
    failures: list[Failure] = []
    seconds: float = 0.0


class Verdict(BaseModel):
    engine: str
    tree: str
    device: str = "cpu"
    sandbox: str = "none"
    gates: list[GateVerdict]
    passed: bool

    def __str__(self):
        return "\n".join(["passed" if self.passed else "FAILED", *map(str, self.gates)])


def judged(folder, gates, on_gate):
    init = folder / "__init__.py"
    good = init.is_file() and "good" in init.read_text()
    found = [
        GateVerdict(
            gate=gate,
            status="pass" if good else "fail",
            passed=good,
            failures=[] if good else [Failure(case="drawn", position=3, error=0.1)],
        )
        for gate in gates
    ]
    for gate in found:
        on_gate(gate)
    return Verdict(engine="engine", tree=tree_hash(folder), gates=found, passed=good)


def fake_judge() -> Judge:
    return Judge(GATES, judged)


def start(desk, judge=None, **options):
    """Run `generate` with the file provider in a thread; (thread, {"run" | "error"})."""
    result = {}

    def work():
        try:
            result["run"] = generation.generate(
                SPEC, "file", folder=desk, judge=judge or fake_judge(), **options
            )
        except BaseException as error:
            result["error"] = error

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, result


def answer(desk, number, text=None, *calls):
    """Wait for a request and answer it: `text` as __init__.py, then calls by name."""
    wait_for(desk / f"request-{number:04d}.json")
    content = [{"type": "text", "text": "as asked"}]
    if text is not None:
        given = {"command": "create", "path": "__init__.py", "file_text": text}
        content.append({"type": "tool_use", "name": EDITOR, "input": given})
    content += [{"type": "tool_use", "name": name, "input": given} for name, given in calls]
    write_atomic(desk / f"reply-{number:04d}.json", json.dumps(content))


def wait_for(path, seconds=20):
    deadline = time.monotonic() + seconds
    while not path.is_file():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.02)
    return path


def recorded_run(local, desk):
    """A run of two phases, with one failed submission, finished."""
    thread, result = start(desk, on_event=lambda text: None)
    answer(desk, 1, "bad = 1\n", ("submit_phase", {}))
    answer(desk, 2, "good = 1\n", ("submit_phase", {}))
    answer(desk, 3, None, ("submit_phase", {}))
    thread.join(20)
    return result["run"]

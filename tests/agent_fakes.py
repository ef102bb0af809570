"""Gates that a test can foresee: an engine passes when its __init__.py says `good`."""

from __future__ import annotations

import threading

import pytest
from pydantic import BaseModel

from metainfer_lab.agent import generation
from metainfer_lab.agent import run as runs
from metainfer_lab.agent.tools import Judge
from metainfer_lab.paths import tree_hash

SPEC = "smollm2-135m-fp32-cpu"
GATES = ("alone", "logits", "decode")


@pytest.fixture
def local_runs(monkeypatch, tmp_path):
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

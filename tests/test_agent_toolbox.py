"""Workspaces, adoption, the record, and the blank-sheet check."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from agent_fakes import SPEC, fake_judge, isolate, recorded_run

from metainfer_lab import agent
from metainfer_lab.agent import generation, overlap
from metainfer_lab.agent import run as runs
from metainfer_lab.agent.replay import replay
from metainfer_lab.errors import InputError
from metainfer_lab.gates import GateVerdict, Verdict, versions
from metainfer_lab.paths import tree_hash


@pytest.fixture(autouse=True)
def local_runs(monkeypatch, tmp_path):
    return isolate(monkeypatch, tmp_path)


def engine(folder, run, text="good = 1\n"):
    (folder / "engine" / "__init__.py").write_text(text)
    (folder / "engine" / "engine.json").write_text(json.dumps({"run": run}))


def test_a_workspace_is_blank_and_holds_what_an_agent_needs(tmp_path):
    folder = agent.workspace(SPEC, tmp_path / "w")
    assert list((folder / "engine").iterdir()) == []
    assert (folder / ".claude/skills/engine-contract/SKILL.md").is_file()
    assert (folder / ".claude/skills/state-leaks/SKILL.md").is_file()
    assert not (folder / ".claude/skills/int8-weights").exists()
    assert f"{SPEC}-a1" in (folder / "AGENTS.md").read_text()
    with pytest.raises(InputError, match="not empty"):
        agent.workspace(SPEC, folder)


def test_verify_of_a_workspace_is_a_command(tmp_path):
    folder = agent.workspace(SPEC, tmp_path / "w")
    done = subprocess.run([folder / "verify", "--gates", "honesty"], capture_output=True, text=True)
    assert done.returncode == 2 and "honesty" in done.stderr


def test_optimise_of_a_workspace_is_a_command(tmp_path):
    """It measures nothing before there is an engine, and judges no change before a start."""
    folder = agent.workspace(SPEC, tmp_path / "w")
    done = subprocess.run([folder / "optimise"], capture_output=True, text=True)
    assert done.returncode == 2 and "engine.json" in done.stderr
    assert "./optimise --propose" in (folder / "AGENTS.md").read_text()


def test_a_gpu_workspace_inspects_kernels_without_a_gpu(tmp_path):
    folder = agent.workspace("qwen3-8b-bf16-h200", tmp_path / "w")
    assert (folder / ".claude/skills/kernel-inspection/SKILL.md").is_file()
    done = subprocess.run([folder / "inspect", "gemv"], capture_output=True, text=True)
    assert done.returncode == 2 and "needs inspection.py" in done.stderr
    assert not (agent.workspace(SPEC, tmp_path / "cpu") / "inspect").exists()


def test_adopt_verifies_records_and_replays(tmp_path):
    folder = agent.workspace(SPEC, tmp_path / "w")
    engine(folder, f"{SPEC}-a1")
    (folder / "ledger.tsv").write_text("id\n1\n")
    run = agent.adopt(folder, judge=fake_judge())
    assert run.info.status == "passed" and run.info.provider == "external"
    assert run.info.confined_by.startswith("nothing known"), "nobody saw what its author saw"
    assert run.info.tree == tree_hash(folder / "engine")
    assert replay(run, judge=fake_judge(), on_event=lambda text: None).faithful
    recorded = agent.record(run.id, engine=True)
    assert (recorded.folder / "ledger.tsv").is_file()
    assert not (recorded.folder / "engine").exists()
    assert tree_hash(runs.ENGINES / SPEC) == run.info.tree
    assert json.loads((runs.ENGINES / "trees.json").read_text()) == {SPEC: run.info.tree}
    assert runs.Run.open(SPEC).id == run.id
    with pytest.raises(InputError, match="adopted already"):
        agent.adopt(folder, judge=fake_judge())


def test_adopt_takes_a_verdict_from_the_machine_that_has_the_gpu(tmp_path):
    """Of this very tree, by today's gates; what was kept while it was tuned stays."""
    folder, brought = agent.workspace(SPEC, tmp_path / "w"), tmp_path / "verdict.json"
    engine(folder, f"{SPEC}-a1")
    measures = {"worst_error": None, "tolerance": None, "reason": "", "failures": []}
    passed = {"status": "pass", "passed": True, "cases": 1, "seconds": 1.0} | measures
    today = [
        GateVerdict(gate=gate, version=versions()[gate], **passed) for gate in ("alone", "logits")
    ]
    verdict = Verdict(
        engine=SPEC,
        tree=tree_hash(folder / "engine"),
        spec=SPEC,
        device="cuda",
        sandbox="bubblewrap",
        checkpoint="seeded",
        gates=today,
        passed=True,
        created="2026-12-01T04:00:00+00:00",
        versions={},
    )
    for wrong, said in (
        ({"tree": "0" * 64}, "is of the tree 000000000000"),
        ({"gates": [today[0].model_copy(update={"version": 0})]}, "raised since: alone"),
    ):
        brought.write_text(verdict.model_copy(update=wrong).model_dump_json())
        with pytest.raises(InputError, match=said):
            agent.adopt(folder, verdict=brought)
    brought.write_text(verdict.model_dump_json())
    run = agent.adopt(folder, verdict=brought)
    assert run.info.status == "passed"
    (runs.RUNS / run.id / "diffs").mkdir(parents=True)
    (runs.RUNS / run.id / "diffs" / "1.diff").write_text("-")
    assert (agent.record(run.id).folder / "diffs" / "1.diff").is_file()


def test_adopt_refuses_a_bad_engine_and_takes_it_when_it_is_right(tmp_path):
    folder = agent.workspace(SPEC, tmp_path / "w")
    with pytest.raises(InputError, match=r"engine\.json: missing"):
        agent.adopt(folder, judge=fake_judge())
    engine(folder, "another-run")
    with pytest.raises(InputError, match="another-run"):
        agent.adopt(folder, judge=fake_judge())
    engine(folder, f"{SPEC}-a1", "bad = 1\n")
    assert agent.adopt(folder, judge=fake_judge()).info.status == "stopped"
    engine(folder, f"{SPEC}-a1")
    assert agent.adopt(folder, judge=fake_judge()).info.status == "passed"


def test_a_copied_passage_is_found_and_a_formula_is_not(tmp_path):
    import transformers.models.llama.modeling_llama as source

    lines = Path(source.__file__).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("class LlamaAttention"))
    indented = "\n".join(f"    {line}" for line in lines[start : start + 60])
    (tmp_path / "model.py").write_text(f"def mine():\n    pass\n\n\n{indented}\n")
    found = overlap.overlaps(tmp_path)
    assert found and found[0].file == "model.py" and "modeling_llama" in str(found)
    (tmp_path / "model.py").write_text("def rms_norm(x, w, eps):\n    return w * x\n" * 20)
    assert overlap.overlaps(tmp_path) == []


def test_a_run_that_copied_does_not_pass(monkeypatch, local_runs, tmp_path):
    found = overlap.Overlap(file="model.py", line=3, source="transformers")
    monkeypatch.setattr(generation, "overlaps", lambda engine: [found])
    run = recorded_run(local_runs, tmp_path / "desk")
    assert run.info.status == "stopped" and "model.py:3" in run.info.reason


def test_only_a_finished_whole_run_is_recorded(local_runs, tmp_path):
    run = recorded_run(local_runs, tmp_path / "desk")
    info = run.info.model_copy(update={"status": "running"})
    runs.save(run.folder, info)
    with pytest.raises(InputError, match="still goes on"):
        agent.record(run.id)
    runs.save(run.folder, run.info)
    path = run.folder / "transcript.jsonl"
    path.write_text(path.read_text().replace("as asked", "as told", 1))
    with pytest.raises(InputError, match="broken chain"):
        agent.record(run.id)
    with pytest.raises(InputError, match="not among the local runs"):
        agent.record("another")

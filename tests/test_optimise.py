"""The loop end to end on a machine of the test's own: rows, kills, records, agents of one's own."""

from __future__ import annotations

import json
import os
import random

import pytest
from agent_fakes import SPEC, isolate
from optimise_fakes import Machine, add, answers, call, judge, lay_out, propose, reply

from metainfer_lab.agent import generation
from metainfer_lab.agent import run as runs
from metainfer_lab.agent.run import locked
from metainfer_lab.errors import InputError
from metainfer_lab.optimise import Optimisation, Proposal, optimise
from metainfer_lab.paths import tree_hash

COLUMNS = ["id", "parent", "hypothesis", "ratio", "ratio_lo", "gates", "lines", "status", "reason"]
IDEAS = ("twenty", "zero", "crash", "fake", "greedy")


@pytest.fixture(autouse=True)
def local_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(generation, "overlaps", lambda engine: [])
    return isolate(monkeypatch, tmp_path)


@pytest.fixture
def engine(tmp_path):
    return lay_out(tmp_path / "mine" / "engine")


def go(engine, desk, **options):
    given = {"bench": Machine(1, quiet=True), "judge": judge(), "on_event": lambda text: None}
    return optimise(engine, "file", folder=desk, **given | options)


def test_a_run_from_the_baseline_to_its_own_end(engine, tmp_path):
    before = tree_hash(engine)
    run = go(engine, answers(tmp_path / "desk", *IDEAS), attempts=len(IDEAS))
    assert tree_hash(engine) == before, "what is given is never changed"
    facts = run.outcome()
    assert facts.passed and (facts.attempts, facts.keeps, facts.best) == (5, 1, "1")
    assert facts.by_status == {"crash": 1, "discard": 2, "gate_failed": 1, "keep": 1}
    assert facts.ratio == pytest.approx(1.2) and facts.divergences == 0
    rows = {row["id"]: row for row in run.rows}
    assert list(rows) == ["0", "1", "2", "3", "4", "5", "final"]
    assert rows["0"]["ratio"] == pytest.approx(1.0) and rows["0"]["parent"] is None
    assert {rows[name]["parent"] for name in "2345"} == {"1"}
    assert "+# twenty" in (run.folder / rows["1"]["diff"]).read_text()
    assert all((run.folder / row["raw"]).is_file() for row in run.rows)
    runs.RUNS.mkdir(exist_ok=True)
    text = (run.folder / "transcript.jsonl").read_text()
    assert "add the word zero" in text and run.transcript.broken_link() is None
    assert run.info.tree == run.transcript.lines[-1].tree
    manifest = json.loads(run.transcript.lines[1].calls[0]["input"]["file_text"])
    assert manifest["run"] == f"{SPEC}-o1" and run.settings.start_run == f"{SPEC}-r1"
    assert run.replay(judge=judge(), on_event=lambda text: None).faithful


def test_killed_at_any_write_it_comes_to_the_same_rows(engine, tmp_path):
    """Each life of the process ends at once, without a clean-up, after a few of its run's writes."""
    whole = go(engine, answers(tmp_path / "desk", *IDEAS[:4]), attempts=4)
    desk, lives = answers(tmp_path / "other", *IDEAS[:4]), 0
    while os.waitstatus_to_exitcode(_one_life(engine, desk, random.randint(1, 12))) == 9:
        lives += 1
    run = Optimisation(runs.LOCAL_RUNS / f"{SPEC}-o2")
    assert lives > 10 and run.info.status == "passed"
    assert run.ledger[COLUMNS].to_csv() == whole.ledger[COLUMNS].to_csv()
    assert run.replay(judge=judge(), on_event=lambda text: None).faithful


def _one_life(engine, desk, writes):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    code, fsync, left = 1, os.fsync, [writes]

    def counted(fd):
        fsync(fd)
        left[0] -= str(runs.LOCAL_RUNS) in os.readlink(f"/proc/self/fd/{fd}")
        if not left[0]:
            os._exit(9)

    try:
        os.fsync = counted
        go(engine, desk, attempts=4, run_id=f"{SPEC}-o2")
        code = 0
    finally:
        os._exit(code)

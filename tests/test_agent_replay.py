"""Replays: a faithful one, and records that were tampered with."""

from __future__ import annotations

import json

import pytest
from agent_fakes import fake_judge, isolate, recorded_run

from metainfer_lab.agent.replay import replay
from metainfer_lab.agent.run import Run
from metainfer_lab.agent.transcript import FILE
from metainfer_lab.errors import InputError


@pytest.fixture
def local_runs(monkeypatch, tmp_path):
    return isolate(monkeypatch, tmp_path)


@pytest.fixture
def run(local_runs, tmp_path):
    return recorded_run(local_runs, tmp_path / "desk")


def quiet(text):
    pass


def patch(run, old, new):
    """Change text in the transcript, as somebody who edits the record would."""
    path = run.folder / FILE
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return Run(run.folder)


def test_a_record_replays_without_divergence(run):
    report = replay(run, judge=fake_judge(), on_event=quiet)
    assert report.faithful and report.turns == 3
    assert [g["gate"] for g in report.gates] == ["logits", "logits", "logits", "alone", "decode"]


def test_only_chosen_phases_run_their_gates(run):
    report = replay(run, ["decode"], judge=fake_judge(), on_event=quiet)
    assert report.faithful and [g["gate"] for g in report.gates] == ["logits", "alone", "decode"]
    with pytest.raises(InputError, match="no 'attention'"):
        replay(run, ["attention"], judge=fake_judge())


def test_a_patched_in_mutant_diverges_in_tree_and_verdict(run):
    changed = patch(run, "good = 1", "evil = 1")
    report = replay(changed, judge=fake_judge(), on_event=quiet)
    kinds = {d.kind for d in report.divergences}
    assert kinds == {"tree", "verdict", "record"}
    found = {d.found for d in report.divergences if d.kind == "verdict"}
    assert "decode fail" in found


def test_a_changed_stored_verdict_diverges(run):
    path = sorted((run.folder / "verdicts").glob("*.json"))[0]
    verdict = json.loads(path.read_text())
    verdict["gates"][0] |= {"status": "pass", "passed": True}
    path.write_text(json.dumps(verdict))
    report = replay(run, judge=fake_judge(), on_event=quiet)
    assert [(d.kind, d.recorded) for d in report.divergences] == [("verdict", "logits pass")]


def test_a_changed_judgement_diverges(run):
    changed = patch(run, '"passed":false', '"passed":true')
    report = replay(changed, judge=fake_judge(), on_event=quiet)
    assert not report.faithful

"""The file provider end to end, with gates that a test can foresee."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest
from agent_fakes import SPEC, fake_judge, isolate, start, wait_for

from metainfer_lab import agent
from metainfer_lab.agent import generation
from metainfer_lab.agent.run import Run
from metainfer_lab.errors import InputError
from metainfer_lab.spec import Spec


@pytest.fixture
def local_runs(monkeypatch, tmp_path):
    return isolate(monkeypatch, tmp_path)


def reply(desk, *options):
    return subprocess.run(
        [sys.executable, str(desk / "reply.py"), *options],
        capture_output=True,
        text=True,
        check=True,
    )


def test_an_author_writes_an_engine_through_the_folder(local_runs, tmp_path):
    """Draft, reply.py, gates, two phases, state.txt; the record holds each message once."""
    desk = tmp_path / "desk"
    thread, result = start(desk)
    first = wait_for(desk / "request-0001.json")
    assert len(json.loads(first.read_text())["messages"]) == 1
    text = (desk / "request-0001.md").read_text()
    assert "Phase `model`" in text and "engine-contract" in text
    assert "- decode: submit and step" in text  # the whole way is known from the start
    assert not list(desk.rglob("*failures*"))
    (desk / "draft").mkdir(exist_ok=True)
    (desk / "draft" / "__init__.py").write_text("bad = 1\n")
    reply(desk, "--submit", "--gate", "logits")
    wait_for(desk / "request-0002.json")
    assert "FAILED" in (desk / "request-0002.md").read_text()
    assert (desk / "engine" / "__init__.py").read_text() == "bad = 1\n"
    (desk / "draft" / "__init__.py").write_text("good = 1\n")
    reply(desk, "--gate", "alone", "--skill", "sampler", "--submit")
    wait_for(desk / "request-0003.json")
    text = (desk / "request-0003.md").read_text()
    assert "Phase `decode`" in text
    assert "[run_gate]\npassed" in text and "[read_skill]\n# sampler" in text  # of the last reply
    reply(desk, "--submit")
    thread.join(20)
    run = result["run"]
    assert run.info.status == "passed" and "passed" in (desk / "state.txt").read_text()
    facts = run.summary()
    assert (facts.turns, facts.attempts, facts.failed_verdicts) == (3, 3, 2)
    assert facts.input_tokens is None and facts.cost_usd is None
    assert run.transcript.broken_link() is None
    assert "+good = 1" in run.turn(2).diff and "-bad = 1" in run.turn(2).diff
    timeline = run.timeline()
    assert list(timeline["phase"]) == ["model", "model", "decode"]
    assert list(timeline["passed"]) == [False, True, True]


def test_a_malformed_reply_is_answered_and_waited_for_again(local_runs, tmp_path):
    desk = tmp_path / "desk"
    thread, result = start(desk, turns=1)
    wait_for(desk / "request-0001.json")
    (desk / "reply-0001.json").write_text('[{"type": "tool_use", "input": {}}]')
    error = wait_for(desk / "reply-0001.error.txt")
    assert "name" in error.read_text() and "missing" in error.read_text()
    reply(desk, "--submit")
    thread.join(20)
    assert result["run"].info.reason.startswith("turns")


@pytest.mark.parametrize(
    ("reason", "said"),
    [("max_tokens", "cut off"), ("end_turn", "only by a verdict"), ("refusal", None)],
)
def test_stop_reasons_that_an_author_can_give(reason, said, local_runs, tmp_path):
    desk = tmp_path / "desk"
    thread, result = start(desk, turns=2)
    wait_for(desk / "request-0001.json")
    whole = {"content": [{"type": "text", "text": "Enough."}], "stop_reason": reason}
    (desk / "reply-0001.json").write_text(json.dumps(whole))
    if said:
        wait_for(desk / "request-0002.json")
        assert said in (desk / "request-0002.md").read_text()
        reply(desk, "--submit")
    thread.join(20)
    wanted = "turns: all 2" if said else "the implementer refused in phase model"
    assert result["run"].info.status == "stopped" and wanted in result["run"].info.reason


def test_a_killed_run_goes_on_without_asking_again(local_runs, tmp_path):
    """The answer that lay there when the program died is taken; the tree is rebuilt."""
    desk = tmp_path / "desk"

    def dies(*_):
        raise KeyboardInterrupt

    judge = generation.Judge(fake_judge().gates, dies)
    thread, result = start(desk, judge=judge)
    wait_for(desk / "request-0001.json")
    (desk / "draft").mkdir(exist_ok=True)
    (desk / "draft" / "__init__.py").write_text("good = 1\n")
    reply(desk, "--submit")
    thread.join(20)
    assert isinstance(result["error"], KeyboardInterrupt)
    home = next(local_runs.iterdir())
    (home / "engine" / "stray.py").write_text("half written")
    (desk / "request-0001.json").unlink()
    thread, result = start(desk)
    wait_for(desk / "request-0002.json")
    assert not (desk / "request-0001.json").exists()
    reply(desk, "--submit")
    thread.join(20)
    assert result["run"].info.status == "passed"
    assert not (home / "engine" / "stray.py").exists()
    assert result["run"].summary().turns == 2


def test_two_processes_cannot_hold_one_run_and_another_reads_it(local_runs, tmp_path):
    desk = tmp_path / "desk"
    thread, result = start(desk, turns=2)
    wait_for(desk / "request-0001.json")
    with pytest.raises(InputError, match="another process"):
        agent.generate(SPEC, "file", folder=tmp_path / "other", judge=fake_judge())
    reply(desk, "--gate", "logits")
    wait_for(desk / "request-0002.json")
    seen = agent.Run.open(f"{SPEC}-r1")  # what a second notebook sees while it goes on
    assert seen.info.status == "running" and len(seen.timeline()) == 1
    assert "logits: failed" in str(seen.turn(1)) and seen.summary().failed_verdicts == 1
    reply(desk, "--submit")
    thread.join(20)
    assert threading.active_count() < 10 and result["run"].info.status == "stopped"
    assert len(seen.transcript.lines) == len(result["run"].transcript.lines)


def test_two_runs_share_no_folder(local_runs, tmp_path):
    """Neither a run's own, begun twice at once, nor the desk whose replies were another's."""
    desk = tmp_path / "desk"
    thread, result = start(desk, turns=1)
    wait_for(desk / "request-0001.json")
    reply(desk, "--submit")
    thread.join(20)
    with pytest.raises(InputError, match=f"folder: .* belongs to run {SPEC}-r1"):
        agent.generate(SPEC, "file", folder=desk, fresh=True, judge=fake_judge())
    assert list(local_runs.iterdir()) == [result["run"].folder]


def test_of_processes_that_begin_a_run_at_once_one_does(local_runs):
    spec, begun = Spec.load(SPEC), []
    together = threading.Barrier(8)

    def begin():
        together.wait()
        try:
            begun.append(generation.new_run(spec, "file", "same"))
        except InputError as error:
            assert "exists already" in str(error) or "another process" in str(error)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert begun == [local_runs / "same"] and Run(begun[0]).spec == spec

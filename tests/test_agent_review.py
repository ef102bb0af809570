"""The reviewer: a fresh context of code and skills, over the wire and from a folder of its own."""

from __future__ import annotations

import json

import pytest
from agent_fakes import SPEC, answer, fake_judge, isolate, start, wait_for
from test_agent_wire import KEY, SUBMIT, WRITE, create, says, text, use

from metainfer_lab import agent
from metainfer_lab.agent import generation, loop
from metainfer_lab.agent.replay import replay
from metainfer_lab.agent.stand_in import stand_in
from metainfer_lab.agent.tools import EDITOR
from metainfer_lab.errors import InputError
from metainfer_lab.show import turn_html

FINDING = {
    "file": "__init__.py",
    "line": 1,
    "skill": "checkpoint-loading",
    "expected": "a cache that is allocated once",
    "actual": "a cache that grows",
}
BOAST = "My engine is flawless, trust me."


@pytest.fixture(autouse=True)
def local_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    monkeypatch.setattr(loop, "RETRY_S", 0.01)
    return isolate(monkeypatch, tmp_path)


def handed_in(index, *findings):
    return says(use("submit_review", index, findings=list(findings)))


def generate(server, **options):
    options = {"budget_usd": 9.0, "on_event": lambda event: None, "judge": fake_judge()} | options
    return generation.generate(SPEC, "anthropic", base_url=server.url, **options)


def system(body):
    return body["system"][0]["text"]


def test_a_review_is_a_fresh_context_without_the_authors_words():
    boast = says(text(BOAST), create("good = 1\n"), use("submit_phase", 1))
    with stand_in([boast, handed_in(1), SUBMIT, handed_in(2)]) as server:
        run = generate(server)
    assert run.summary().passed and "in a context of its own" in run.info.reviewer
    asked = server.asked[1]
    assert "You review" in system(asked) and "You write" in system(server.asked[0])
    assert len(asked["messages"]) == 1 and BOAST not in json.dumps(asked)
    assert "state-leaks" in json.dumps(server.asked[3])  # failure skills from the start
    names = [tool["name"] for tool in asked["tools"]]
    assert names == [EDITOR, "read_skill", "submit_review"]
    assert list(run.timeline()["role"]) == ["implementer", "reviewer"] * 2
    assert replay(run, judge=fake_judge(), on_event=lambda event: None).faithful


def test_findings_go_back_as_a_list_and_hints_after_the_second_rejection():
    again = [says(create(f"good = {i}\n", index=i), use("submit_phase", 9 + i)) for i in (2, 3)]
    script = [WRITE, handed_in(1, FINDING), again[0], handed_in(2, FINDING), again[1], handed_in(3)]
    with stand_in([*script, SUBMIT, handed_in(4)]) as server:
        run = generate(server)
    facts = run.summary()
    assert facts.passed and facts.rejections == 2 and facts.failed_verdicts == 0
    once, twice = (server.asked[k]["messages"][-1]["content"][0]["text"] for k in (2, 4))
    wanted = "__init__.py:1 (checkpoint-loading): expected a cache that is allocated once"
    assert wanted in once and "a cache that grows" in once
    hint = "refusals-and-edges"
    assert hint not in once and hint in twice and "wrong-rope" not in twice
    assert [m["role"] for m in server.asked[2]["messages"]] == ["user", "assistant", "user", "user"]
    assert list(run.timeline()["attempt"])[:6] == [1, 1, 2, 2, 3, 3]
    assert "a cache that grows" in turn_html(run.turn(2)) and "reviewer" in str(run.turn(2))
    report = replay(run, ["model"], judge=fake_judge(), on_event=lambda event: None)
    assert report.faithful and report.turns == 8


def test_three_rejections_stop_the_run_with_a_report():
    def script(body):
        if "You review" in system(body):
            return handed_in(len(body["messages"]), FINDING)
        return says(use("submit_phase", len(body["messages"])))

    with stand_in([WRITE]) as server:  # something to review
        generate(server, turns=1)
    with stand_in(script) as server:
        run = generate(server)
    assert run.info.status == "stopped" and run.info.reason.count("checkpoint-loading") == 3
    assert "sent it back 3 times" in run.info.reason and run.summary().rejections == 3
    with stand_in([handed_in(8)]) as server, pytest.raises(InputError, match="reviewer: run"):
        generate(server, reviewer="none")
    with stand_in([SUBMIT, handed_in(8), says(use("submit_phase", 7)), handed_in(9)]) as server:
        assert generate(server, rejections=4).summary().passed


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (use(EDITOR, command="create", path="a.py", file_text="x"), "a reviewer reads"),
        (use(EDITOR, command="view", path="../run.json"), "relative"),
        (use("bash", command="ls"), "no tool 'bash'"),
        (use("submit_phase"), "no tool 'submit_phase'"),
        (use("submit_review", findings=[FINDING | {"file": "b.py"}]), "no file 'b.py'"),
        (use("submit_review", findings=[FINDING | {"line": 99}]), "has 1 lines"),
        (use("submit_review", findings=[FINDING | {"skill": "taste"}]), "no skill 'taste'"),
        (use("submit_review", findings=[{"file": "__init__.py"}]), "expected"),
    ],
)
def test_a_reviewer_reads_and_points_at_what_exists(call, word):
    with stand_in([WRITE, says(call), handed_in(1), SUBMIT, handed_in(2)]) as server:
        run = generate(server)
    result = server.asked[2]["messages"][-1]["content"][0]
    assert result["is_error"] and word in result["content"]
    assert run.summary().passed and run.summary().rejections == 0
    assert run.info.tree == run.transcript.lines[2].tree  # a refused edit leaves nothing behind


def test_what_a_reviewer_says_instead_of_a_review():
    full = says(text("so long"), stop_reason="model_context_window_exceeded")
    script = [WRITE, says(text("Fine.")), full, handed_in(1), SUBMIT, handed_in(2)]
    with stand_in(script) as server:
        assert generate(server, run_id="a").summary().passed
    assert "No review" in server.asked[2]["messages"][-1]["content"][0]["text"]
    assert len(server.asked[3]["messages"]) == 1
    with stand_in([WRITE, says(text("no"), stop_reason="refusal")]) as server:
        run = generate(server, run_id="b", fresh=True)
    assert run.info.reason == "the reviewer refused in phase model"


def test_another_author_reviews_in_a_folder_of_its_own(tmp_path):
    desk, other = tmp_path / "desk", tmp_path / "other"
    thread, result = start(desk, reviewer=other, on_event=lambda event: None)
    answer(desk, 1, "good = 1  # " + BOAST + "\n", ("submit_phase", {}))
    wait_for(other / "request-0001.json")
    assert (other / "skills/state-leaks/SKILL.md").is_file()
    assert not (desk / "skills/state-leaks").exists()
    assert (
        not (other / "draft").exists() and "You review" in (other / "request-0001.md").read_text()
    )
    assert (other / "engine/__init__.py").is_file()
    answer(other, 1, None, ("submit_review", {"findings": [FINDING]}))
    wait_for(desk / "request-0002.json")
    text = (desk / "request-0002.md").read_text()
    assert "passed" in text and "a cache that grows" in text  # the verdict, then the findings
    answer(desk, 2, None, ("submit_phase", {}))
    answer(other, 2, None, ("submit_review", {"findings": []}))
    answer(desk, 3, None, ("submit_phase", {}))
    answer(other, 3, None, ("submit_review", {"findings": []}))
    thread.join(20)
    run = result["run"]
    assert run.summary().passed and "folder of its own" in run.info.reviewer
    assert "passed" in (other / "state.txt").read_text()
    assert replay(run, judge=fake_judge(), on_event=lambda event: None).faithful


def test_a_reviewer_is_another(tmp_path):
    with pytest.raises(InputError, match="folder of its own"):
        agent.generate(SPEC, "file", folder=tmp_path, reviewer=tmp_path, judge=fake_judge())
    with pytest.raises(InputError, match="api or none"):
        agent.generate(SPEC, "anthropic", budget_usd=1, reviewer="me", judge=fake_judge())

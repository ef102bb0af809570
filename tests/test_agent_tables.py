"""Runs in rows: what each took, and k of n for a spec."""

from __future__ import annotations

import pytest
from agent_fakes import SPEC, answer, isolate, start
from test_agent_wire import KEY, SUBMIT, WRITE, generate

from metainfer_lab import agent
from metainfer_lab.agent.stand_in import USAGE, stand_in


@pytest.fixture(autouse=True)
def local_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    return isolate(monkeypatch, tmp_path)


def through_a_folder(desk, texts, **options):
    thread, result = start(desk, on_event=lambda event: None, fresh=True, **options)
    for number, text in enumerate(texts, 1):
        answer(desk, number, text, ("submit_phase", {}))
    thread.join(20)
    return result["run"]


def test_three_runs_of_a_spec_are_two_of_three(tmp_path):
    good = through_a_folder(tmp_path / "a", ["good = 1\n", None])
    slow = through_a_folder(tmp_path / "b", ["bad = 1\n", "good = 1\nx = 2\n", None])
    lost = through_a_folder(tmp_path / "c", ["bad = 1\n", "bad = 2\n"], attempts=2)
    with stand_in([WRITE, SUBMIT]) as server:
        paid = generate(server, fresh=True)
    rows = agent.table([good, slow, lost, paid]).set_index("id")
    assert list(rows.index) == [f"{SPEC}-r{n}" for n in (1, 2, 3, 4)]
    assert list(rows["passed"]) == [True, True, False, True]
    assert list(rows["attempts"]) == [2, 3, 2, 2]
    assert list(rows["failed_verdicts"]) == [0, 1, 2, 0]
    assert list(rows["lines_of_code"]) == [1, 2, 1, 1]
    assert rows["input_tokens"].isna().tolist() == [True, True, True, False]
    assert rows.loc[paid.id, "output_tokens"] == 2 * USAGE["output_tokens"]
    assert rows.loc[paid.id, "cost_usd"] > 0 and rows.loc[slow.id, "seconds"] > 0
    by_spec = agent.by_spec([good, slow, lost, paid]).set_index("provider")
    assert dict(by_spec["k_of_n"]) == {"file": "2 of 3", "anthropic": "1 of 1"}
    assert by_spec.loc["file", "attempts"] == 2.5 and by_spec["cost_usd"].isna()["file"]
    assert by_spec.loc["anthropic", "cost_usd"] == pytest.approx(rows.loc[paid.id, "cost_usd"])
    assert list(agent.table()["id"]) == list(rows.index)  # all there are, by number

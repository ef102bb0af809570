"""The view of a run that goes on: what it says of a turn, and where it says it."""

from __future__ import annotations

import pytest
from agent_fakes import isolate
from test_agent_wire import KEY, SUBMIT, WRITE, create, generate, says, use

from metainfer_lab.agent import watch
from metainfer_lab.agent.stand_in import stand_in

BAD = says(create("bad = 1\n", index=7), use("submit_phase", 8))


@pytest.fixture(autouse=True)
def local_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    return isolate(monkeypatch, tmp_path)


def test_each_turn_says_where_the_run_stands():
    events = []
    with stand_in([BAD, WRITE, SUBMIT]) as server:
        generate(server, on_event=events.append)
    turns = [event for event in events if event.startswith(watch.STATUS)]
    assert turns == [
        "turn 1 · implementer · phase model · attempt 1 · 1,200 tokens · 0.01 USD",
        "turn 2 · implementer · phase model · attempt 2 · 2,400 tokens · 0.02 USD · "
        "last verdict failed: logits",
        "turn 3 · implementer · phase decode · attempt 1 · 3,600 tokens · 0.02 USD · "
        "last verdict passed",
    ]


def test_a_log_gets_plain_lines(capsys):
    assert watch.view() is watch.say_plainly
    with stand_in([WRITE, SUBMIT]) as server:
        generate(server, on_event=None)
    assert "turn 2 · implementer · phase decode" in capsys.readouterr().out


def test_a_terminal_shows_in_bold_where_the_run_stands(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for event in ("  submit_phase", "turn 2 · implementer"):
        watch.say_plainly(event)
    assert capsys.readouterr().out == "  submit_phase\n\x1b[1mturn 2 · implementer\x1b[0m\n"


def test_a_cell_gets_one_view_that_changes(monkeypatch):
    shown = []

    class Handle:
        def update(self, data, raw):
            shown.append(data)

    monkeypatch.setattr("IPython.display.display", lambda *args, **options: Handle())
    monkeypatch.setattr(watch, "in_notebook", lambda: True)
    seen = watch.view()
    for event in ("turn 1 · implementer", *(f"  <call> {n}" for n in range(99))):
        seen(event)
    assert shown[-1]["text/html"].startswith("<b>turn 1 · implementer</b>")
    assert (
        "&lt;call&gt; 98" in shown[-1]["text/html"] and "call> 3\n" not in shown[-1]["text/plain"]
    )
    assert len(shown[-1]["text/plain"].splitlines()) == watch.KEPT + 1

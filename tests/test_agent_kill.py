"""Killed outright at ten random points, a run comes to the same tree and asks nothing again."""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import signal
import time

import numpy as np
import pytest
from agent_fakes import GATES, SPEC, Judge, isolate, judged

from metainfer_lab.agent import generation
from metainfer_lab.agent.run import Run
from metainfer_lab.agent.tools import EDITOR
from metainfer_lab.agent.transcript import FILE

SEED = secrets.randbelow(2**32)
KILLS = 10


@pytest.fixture
def local_runs(monkeypatch, tmp_path):
    return isolate(monkeypatch, tmp_path)


def edit(**given):
    return {"type": "tool_use", "name": EDITOR, "input": given}


def replies():
    """What the author answers: files, changes, refused edits, failed and passed submissions."""
    submit = {"type": "tool_use", "name": "submit_phase", "input": {}}
    gate = {"type": "tool_use", "name": "run_gate", "input": {"gates": ["logits"]}}
    yield [edit(command="create", path="__init__.py", file_text="bad = 0\n"), submit]
    for n in range(8):
        lines = edit(command="insert", path="__init__.py", insert_line=n, insert_text=f"x = {n}")
        yield [lines, edit(command="create", path=f"part_{n}.py", file_text=f"{n}\n"), gate]
    change = {"command": "str_replace", "path": "__init__.py", "old_str": "bad", "new_str": "good"}
    yield [edit(**change), edit(**change), submit]  # the second is refused
    yield [edit(command="create", path="last.py", file_text="1\n"), submit]


def lay_out(desk):
    """Every reply lies there before it is asked for."""
    desk.mkdir()
    for number, content in enumerate(replies(), 1):
        (desk / f"reply-{number:04d}.json").write_text(json.dumps(content))
    return desk


def slow(folder, gates, on_gate):
    time.sleep(0.02)
    return judged(folder, gates, on_gate)


def generate(desk, name):
    quiet = {"on_event": lambda text: None, "judge": Judge(GATES, slow)}
    return generation.generate(SPEC, "file", folder=desk, run_id=name, **quiet)


def lines_of(home):
    path = home / FILE
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def killed_at(desk, home, line, delay):
    """Run until a line is written, and kill a moment later; the exit code."""
    child = multiprocessing.get_context("fork").Process(target=generate, args=(desk, home.name))
    child.start()
    deadline = time.monotonic() + 30
    while lines_of(home) < line and child.is_alive():
        assert time.monotonic() < deadline, f"line {line} did not come (seed {SEED})"
        time.sleep(0.001)
    time.sleep(delay)
    if child.is_alive():
        os.kill(child.pid, signal.SIGKILL)
    child.join()
    return child.exitcode


def test_a_run_killed_at_ten_random_points_resumes_to_the_same_tree(local_runs, tmp_path):
    whole = generate(lay_out(tmp_path / "whole-desk"), "whole")
    total = len(whole.transcript.lines)
    rng = np.random.default_rng(SEED)
    desk, home = lay_out(tmp_path / "desk"), local_runs / "killed"
    points = sorted(rng.choice(range(1, total - 1), KILLS, replace=False).tolist())
    codes = [killed_at(desk, home, p, float(rng.uniform(0, 0.04))) for p in points]
    assert codes.count(-signal.SIGKILL) >= KILLS - 2, codes  # one may have ended before its time
    run = generate(desk, "killed")
    assert run.info.status == whole.info.status == "passed"
    assert run.info.tree == whole.info.tree and run.summary().turns == whole.summary().turns
    assert run.transcript.broken_link() is None and len(run.transcript.lines) == total
    said = [line.message for line in whole.transcript.replies()]
    assert [line.message for line in run.transcript.replies()] == said
    assert len(list(desk.glob("request-*.json"))) == len(said)
    assert [j.passed for line in Run(home).transcript.lines for j in line.judgements] == [
        j.passed for line in whole.transcript.lines for j in line.judgements
    ]

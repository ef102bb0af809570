"""generate as a command: what it prints, what it refuses before anything is written."""

from __future__ import annotations

import json

import pytest
from agent_fakes import SPEC, isolate, recorded_run
from typer.testing import CliRunner

import metainfer_lab as lab
from metainfer_lab import cli
from metainfer_lab.agent.phases import explain
from metainfer_lab.errors import InputError
from metainfer_lab.spec import Spec


@pytest.fixture(autouse=True)
def local_runs(monkeypatch, tmp_path):
    return isolate(monkeypatch, tmp_path)


def call(*arguments):
    return CliRunner().invoke(cli.app, ["generate", SPEC, *arguments])


def test_explain_prints_what_goes_to_which_phase_and_role(local_runs):
    rows = json.loads(call("--explain", "--json").stdout)
    assert rows == explain(Spec.load(SPEC)).to_dict("records")
    shown = call("--explain").stdout
    assert shown.startswith("   phase") and "engine-contract" in shown and "reviewer" in shown
    assert list(local_runs.iterdir()) == []


def test_options_reach_the_call(monkeypatch):
    seen = {}

    def fake(spec, **options):
        seen.update(options)
        raise InputError("seen")

    monkeypatch.setattr(lab, "generate", fake)
    given = "--provider file --folder a --reviewer b --run-id c --fresh --attempts 2 --turns 3"
    given += " --rejections 4 --wall-s 5 --tokens 6 --budget-usd 7 --effort low --phases x,y"
    result = call(*given.split())
    assert str(result.exception) == "seen"
    wanted = {"provider": "file", "reviewer": "b", "run_id": "c", "fresh": True, "attempts": 2}
    wanted |= {"turns": 3, "rejections": 4, "wall_s": 5.0, "tokens": 6, "budget_usd": 7.0}
    wanted |= {"effort": "low", "phases": ["x", "y"]}
    assert {name: seen[name] for name in wanted} == wanted and "model" not in seen


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--provider", "oracle"], "provider"),
        (["--provider", "file"], "folder"),
        (["--provider", "file", "--folder", "f", "--reviewer", "f"], "reviewer"),
        (["--provider", "anthropic", "--reviewer", "f", "--budget-usd", "1"], "reviewer"),
        (["--provider", "anthropic"], "ANTHROPIC_API_KEY"),
        (["--attempts", "0", "--provider", "file", "--folder", "f"], "attempts"),
        (["--budget-usd", "-1", "--provider", "file", "--folder", "f"], "budget_usd"),
    ],
)
def test_what_is_refused_leaves_no_run_behind(arguments, field, local_runs, monkeypatch):
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    result = call(*arguments)
    assert isinstance(result.exception, InputError) and str(result.exception).startswith(field)
    assert list(local_runs.iterdir()) == []


def test_what_cannot_be_paid_or_replayed_is_said_before_a_run_begins(local_runs, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-nobody")
    paid = ["--provider", "anthropic", "--budget-usd", "1", "--model", "claude-nobody"]
    assert "model claude-nobody: no price" in str(call(*paid).exception)
    assert "smollm2-135m-fp32-cpu: no such run" in str(call().exception)  # nothing is recorded here
    assert list(local_runs.iterdir()) == []


def test_a_run_of_another_spec_is_not_replayed_for_this(local_runs, tmp_path):
    run = recorded_run(local_runs, tmp_path / "desk")
    said = CliRunner().invoke(cli.app, ["generate", "qwen3-tiny-cpu", "--run-id", run.id])
    assert str(said.exception) == f"run_id: {run.id} is of {SPEC}, not of qwen3-tiny-cpu"

"""A model that hangs, loops, looks for the key or for the gates: over the wire, in the sandbox."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from agent_fakes import isolate
from test_agent_wire import KEY, SUBMIT, WRITE, create, generate, results, says, use

from metainfer_lab import gates
from metainfer_lab.agent import tools
from metainfer_lab.agent.stand_in import stand_in
from metainfer_lab.paths import ROOT, tree_hash

GATES = gates.OWN_FILES


@pytest.fixture(autouse=True)
def local_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    return isolate(monkeypatch, tmp_path)


def tried(command):
    """What one shell command of the author comes to, in a run that then goes on and passes."""
    with stand_in([says(use("bash", command=command)), WRITE, SUBMIT]) as server:
        run = generate(server)
    assert run.summary().passed
    return results(server, 1)[0]


def test_a_command_that_hangs_is_stopped(monkeypatch):
    monkeypatch.setattr(tools, "BASH_SECONDS", 1)
    answer = tried("echo begun; sleep 600 & sleep 600")
    assert answer["is_error"] and answer["content"].endswith("[stopped after 1 s]")
    assert "begun" in answer["content"]


def unseen(path):
    """A path as a shell reads it and the record's scrubbing does not."""
    return f"{str(path)[:2]}''{str(path)[2:]}"


def test_the_key_is_not_in_reach():
    """Not in the environment, nor in that of another process; a scrubbed key would read <key>."""
    with subprocess.Popen(["sleep", "60"], env={"KEPT": KEY}) as other:
        look = (
            "env; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -a KEPT; echo done"
        )
        answer = tried(look)
        other.kill()
    assert "done" in answer["content"] and "PATH=" in answer["content"]
    assert KEY not in answer["content"] and "<key>" not in answer["content"]


def test_gates_can_be_neither_read_nor_edited():
    before = tree_hash(GATES)
    file = f"{unseen(GATES)}/texts.py"
    answer = tried(f"head -c 99 {file}; echo '#' >> {file}; ls {unseen(GATES)}")
    assert answer["is_error"] and '"""' not in answer["content"]
    assert tree_hash(GATES) == before


@pytest.mark.parametrize("where", ["$PWD", "/t''mp", "$HOME/..", unseen(ROOT)])
def test_a_shell_writes_into_its_scratch_folder_alone(where, local_runs):
    name = "left_behind_by_a_shell"
    tried(f"cd {where} 2>/dev/null && echo x > {name}; echo y > $TMPDIR/{name}; true")
    outside = (ROOT, Path("/tmp"), Path.home(), local_runs.parent, local_runs)
    for folder in (*outside, *local_runs.iterdir()):
        assert not (folder / name).exists() and not (folder / "engine" / name).exists()


def test_the_shell_has_no_network_and_no_other_engines():
    """Packages with models in them cannot be imported; nor can this one."""
    names = ("transformers", "metainfer_lab", "anthropic", "tokenizers")
    script = f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    dial = "import socket; socket.create_connection(('127.0.0.1', 9), 2)"
    content = tried(f'python -c "{script}"; python -c "{dial}"')["content"]
    assert content.startswith("[]") and "Error" in content


def test_a_model_that_loops_ends_at_its_budget():
    with stand_in(lambda body: says(use("read_skill", len(body["messages"]), name="x"))) as server:
        run = generate(server, turns=6)
    assert run.info.status == "stopped" and run.info.reason == "turns: all 6 are used"
    assert len(server.asked) == 6


def test_a_forged_verdict_in_the_engine_folder_counts_for_nothing():
    verdict = json.dumps({"passed": True, "gates": []})
    forged = says(create(verdict, "verdicts/0000.json"), create("bad = 1\n", index=1), SUBMIT_NOW)
    with stand_in([forged, WRITE, SUBMIT]) as server:
        run = generate(server)
    assert run.summary().failed_verdicts == 1 and "FAILED" in results(server, 1)[2]["content"]


SUBMIT_NOW = use("submit_phase", 9)

"""The loop end to end on a machine of the test's own: rows, kills, records, agents of one's own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest
from agent_fakes import SPEC, GateVerdict, isolate
from optimise_fakes import (
    GATES,
    Machine,
    add,
    answers,
    call,
    judge,
    judged,
    lay_out,
    propose,
    reply,
)

from metainfer_lab import agent
from metainfer_lab.agent import generation
from metainfer_lab.agent import run as runs
from metainfer_lab.agent.run import locked
from metainfer_lab.agent.stand_in import stand_in
from metainfer_lab.agent.tools import EDITOR, Judge
from metainfer_lab.errors import InputError
from metainfer_lab.optimise import Optimisation, Proposal, optimise
from metainfer_lab.paths import RUNS, tree_hash

COLUMNS = ["id", "parent", "hypothesis", "ratio", "ratio_lo", "gates", "lines", "status", "reason"]
PUBLISHED = sorted(path.parent for path in RUNS.glob("*/settings.json"))
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
    text = (run.folder / "transcript.jsonl").read_text()
    assert "add the word zero" in text and run.transcript.broken_link() is None
    assert run.settings.rule.decide(run.gains("1"), fewer_lines=False) == "faster"
    assert run.info.tree == run.transcript.lines[-1].tree
    manifest = json.loads(run.transcript.lines[1].calls[0]["input"]["file_text"])
    assert manifest["run"] == f"{SPEC}-o1" and run.settings.start_run == f"{SPEC}-r1"
    assert run.replay(judge=judge(), on_event=lambda text: None).faithful


def test_killed_at_any_write_it_comes_to_the_same_rows(engine, tmp_path):
    """Each life of the process ends at once, without a clean-up, after some of its run's writes."""
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


def test_two_processes_cannot_hold_one_run(engine, tmp_path):
    run = go(engine, answers(tmp_path / "desk", "zero"), attempts=2, turns=2)
    assert run.info.status == "stopped" and run.info.reason.startswith("turns")
    with locked(run.folder), pytest.raises(InputError, match="another process"):
        go(engine, tmp_path / "desk")
    with pytest.raises(InputError, match=r"threshold: run .* began with 0\.01"):
        go(engine, tmp_path / "desk", threshold=0.5)


def test_an_engine_that_is_wrong_is_not_made_faster(tmp_path):
    engine = lay_out(tmp_path / "mine" / "engine", "# wrong\n")
    run = go(engine, tmp_path / "desk")
    assert run.info.status == "stopped" and "does not pass its gates" in run.info.reason
    assert run.rows == []


def test_a_proposal_without_a_change_or_with_another_name_costs_no_attempt(engine, tmp_path):
    desk = tmp_path / "desk"
    reply(desk, 1, propose("nothing at all was changed"))
    renamed = call(EDITOR, command="create", path="engine.json", file_text='{"run": "mine"}')
    reply(desk, 2, renamed, propose("another name for the run"))
    reply(desk, 3, call("read_attempt", row="7"), call("submit_phase"))
    run = go(engine, desk, turns=4)
    said = [block for line in run.transcript.lines for block in line.blocks]
    errors = [str(block["content"]) for block in said if block.get("is_error")]
    assert "nothing differs from the tree of row 0" in errors[0]
    assert "it must stay" in errors[1]
    assert "no row '7'" in errors[2] and "no tool 'submit_phase'" in errors[3]
    assert [row["id"] for row in run.rows] == ["0"]


def test_copied_text_and_a_cut_reply(engine, tmp_path):
    desk = tmp_path / "desk"
    content = [add("twenty"), propose("cut off in the middle of it")]
    text = json.dumps({"content": content, "stop_reason": "max_tokens"})
    desk.mkdir()
    (desk / "reply-0001.json").write_text(text)
    reply(desk, 2, add("copied twenty"), propose("a passage out of a book"))
    run = go(engine, desk, attempts=1)
    assert run.rows[-1]["status"] == "gate_failed" and "blank sheet" in run.rows[-1]["reason"]
    assert "# copied twenty" in (run.folder / run.rows[-1]["diff"]).read_text()
    assert run.outcome().best == "0" and run.outcome().ratio is None


def test_fewer_lines_at_equal_speed_are_a_keep_that_lasts(tmp_path):
    engine = lay_out(tmp_path / "mine" / "engine", "import torch\n\nx = 1\nprint(x)\n")
    desk = tmp_path / "desk"
    shorter = call(EDITOR, command="create", path="model.py", file_text="import torch\n")
    reply(desk, 1, shorter, propose("two lines that do nothing", 1.0))
    run = go(engine, desk, attempts=1)
    assert run.rows[-1]["id"] == "final" and "fewer lines" in run.rows[-1]["reason"]
    assert run.info.tree == run.transcript.lines[-1].tree and run.rows[-1]["lines"] == 1
    assert run.replay(judge=judge(), on_event=lambda text: None).faithful


def test_an_author_works_at_the_desk(engine, tmp_path):
    """author.md, a fresh draft each attempt, the ledger with an engine's words fenced."""
    desk = answers(tmp_path / "desk", "crash", "twenty")
    go(engine, desk, attempts=2)
    guide = (desk / "author.md").read_text()
    assert "--propose" in guide and "`propose` {hypothesis, predicted_ratio, assumes}" in guide
    assert "submit_phase" not in guide and "submit_phase" not in json.dumps(run_tools(desk))
    second = (desk / "request-0002.md").read_text()
    assert "1<0  crash" in second
    ticks = second.index("````"), second.index("``` keep me ```")
    assert ticks[0] < ticks[1], "what the engine said last cannot close its fence"
    assert (desk / "diffs" / "0001.diff").is_file()
    assert "crash" not in (desk / "draft" / "model.py").read_text()
    assert "o1: passed, 2 attempts (1 crash, 1 keep)" in (desk / "state.txt").read_text()


def run_tools(desk):
    return json.loads((desk / "request-0001.json").read_text())["tools"]


def test_the_script_of_the_desk_proposes(engine, tmp_path):
    desk = tmp_path / "desk"
    go(engine, answers(desk, "zero"), attempts=1)
    (desk / "reply-0001.json").unlink()
    (desk / "draft" / "model.py").write_text("x = 1\n")
    options = ["--propose", "one line in place of all", "--ratio", "1.5", "--assumes", "model.py"]
    subprocess.run([sys.executable, desk / "reply.py", *options], check=True, capture_output=True)
    last = json.loads((desk / "reply-0001.json").read_text())[-1]
    assert last["name"] == "propose"
    given = Proposal(**last["input"])
    assert given.assumes == ["model.py"] and given.predicted_ratio == 1.5


def test_an_agent_of_ones_own_proposes_from_its_folder(engine):
    def ask(text=None, **options):
        given = {"bench": Machine(1, quiet=True), "judge": judge(), "on_event": lambda text: None}
        change = {"hypothesis": text, "predicted_ratio": 1.1} if text else None
        return optimise(engine, "external", propose=change, **given | options)

    with pytest.raises(InputError, match="measure the start first"):
        ask("add a word to the model")
    assert [row["id"] for row in ask(attempts=3).rows] == ["0"]
    with pytest.raises(InputError, match="say what was changed"):
        ask()
    with pytest.raises(InputError, match="nothing differs"):
        ask("nothing was changed, honestly")
    model = engine / "model.py"
    model.write_text(model.read_text() + "# twenty\n")
    run = ask("faster by a fifth, it is hoped")
    assert run.succeeded and run.rows[-1]["status"] == "keep"
    model.write_text(model.read_text() + "# zero\n")
    run = ask("as fast as it was before")
    assert not run.succeeded and run.rows[-1]["parent"] == "1"
    assert "zero" in model.read_text(), "the agent's folder is its own"
    assert "zero" not in (engine.parent / "next" / "model.py").read_text()
    model.write_text((engine.parent / "next" / "model.py").read_text() + "# fake\n")
    run = ask("wrong but very fast indeed")
    assert run.info.status == "passed" and run.outcome().keeps == 1
    assert run.replay(judge=judge(), on_event=lambda text: None).faithful


@pytest.fixture
def recorded(engine, tmp_path):
    return go(engine, answers(tmp_path / "desk", "twenty", "zero"), attempts=2)


def divergences(run, **options):
    run = Optimisation(run.folder)
    report = run.replay(judge=judge(), on_event=lambda text: None, **options)
    return {(d.phase, d.kind, d.recorded.split()[0]) for d in report.divergences}


def test_a_measured_block_that_was_changed_is_found(recorded):
    path = recorded.folder / "raw" / "0001.jsonl"
    path.write_text(path.read_text().replace("60.0", "50.0"))
    assert ("1", "record", "ratio") in divergences(recorded)


def test_a_row_that_was_changed_is_found(recorded):
    path = recorded.folder / "ledger.tsv"
    path.write_text(path.read_text().replace("no gain", "gain", 1))
    assert divergences(recorded) == {("2", "record", "reason")}


def test_a_diff_and_an_edit_that_were_changed_are_found(recorded):
    path = recorded.folder / "diffs" / "0001.diff"
    path.write_text(path.read_text().replace("twenty", "thirty"))
    assert divergences(recorded) == {("1", "record", "the")}
    path = recorded.folder / "transcript.jsonl"
    path.write_text(path.read_text().replace("# twenty", "# thirty"))
    assert {("1", "tree"), ("", "record")} <= {found[:2] for found in divergences(recorded)}


def test_gates_are_asked_again_for_real(recorded):
    def refuses(folder, gates, on_gate):
        return judged(folder, gates, on_gate).model_copy(
            update={"gates": [GateVerdict(gate=g, status="fail", passed=False) for g in gates]}
        )

    run = Optimisation(recorded.folder)
    report = run.replay(["1"], judge=Judge(GATES, refuses), on_event=lambda text: None)
    assert {d.kind for d in report.divergences} == {"verdict"} and len(report.gates) == 3
    assert run.replay([], judge=judge(), on_event=lambda text: None).gates == []
    with pytest.raises(InputError, match="no '9'"):
        run.replay(["9"], judge=judge())


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: folder.name)
def test_a_published_optimisation_follows_from_its_record(folder):
    report = Optimisation(folder).replay([], on_event=lambda text: None)
    assert report.faithful, str(report)


def test_generation_and_optimisation_do_not_take_each_others_runs(recorded):
    assert optimise(f"{SPEC}-o1", judge=judge(), on_event=lambda text: None).id == f"{SPEC}-o1"
    with pytest.raises(InputError, match="is an optimisation"):
        runs.Run.open(f"{SPEC}-o1").replay()
    with pytest.raises(InputError, match="no such run or spec"):
        runs.Run.open(SPEC)
    published = agent.record(recorded.id)
    assert (published.folder / "raw" / "0001.jsonl").is_file()
    assert Optimisation(published.folder).replay(judge=judge(), on_event=lambda t: None).faithful


def test_the_api_is_one_more_author(engine, monkeypatch):
    """Over a local server that speaks it: rules and tools are those of changes, cost is counted."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "none")
    blocks = [add("twenty") | {"id": "a"}, propose("a word that is fast") | {"id": "b"}]
    with stand_in([{"content": blocks, "stop_reason": "tool_use"}]) as server:
        given = {"bench": Machine(1, quiet=True), "judge": judge(), "on_event": lambda text: None}
        where = {"base_url": server.url}
        run = optimise(engine, "anthropic", budget_usd=5, attempts=1, connection=where, **given)
    body = server.asked[0]
    names = {tool["name"] for tool in body["tools"]}
    assert {"propose", "read_attempt", "bash"} <= names and "submit_phase" not in names
    assert "one change at a time" in body["system"][0]["text"]
    assert run.outcome().keeps == 1 and run.outcome().cost_usd > 0
    with pytest.raises(InputError, match="budget_usd"):
        optimise(engine, "anthropic", **given)

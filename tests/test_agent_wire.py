"""The real client over real HTTP: a local server speaks the Messages API, failures included."""

from __future__ import annotations

import json
import time

import pytest
from agent_fakes import SPEC, fake_judge, isolate

from metainfer_lab.agent import generation, loop
from metainfer_lab.agent.replay import replay
from metainfer_lab.agent.stand_in import USAGE, Drop, Garble, Refuse, stand_in
from metainfer_lab.agent.tools import EDITOR
from metainfer_lab.errors import InputError

KEY = "sk-ant-api03-thisisasecret"


@pytest.fixture(autouse=True)
def local_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    monkeypatch.setattr(loop, "RETRY_S", 0.01)
    return isolate(monkeypatch, tmp_path)


def use(name, index=0, /, **given):
    return {"type": "tool_use", "id": f"toolu_{name}_{index}", "name": name, "input": given}


def create(text, path="__init__.py", index=0):
    return use(EDITOR, index, command="create", path=path, file_text=text)


def says(*content, stop_reason=None):
    calls = any(block["type"] == "tool_use" for block in content)
    return {
        "content": list(content),
        "stop_reason": stop_reason or ("tool_use" if calls else "end_turn"),
    }


def text(words):
    return {"type": "text", "text": words}


WRITE = says(create("good = 1\n"), use("submit_phase", 1))
SUBMIT = says(use("submit_phase", 2))


def generate(server, **options):
    quiet = {"on_event": lambda event: None, "judge": fake_judge(), "reviewer": "none"}
    options = {"budget_usd": 5.0} | quiet | options
    return generation.generate(SPEC, "anthropic", base_url=server.url, **options)


def results(server, k):
    """Text of the tool results in the last message of the k-th call."""
    content = server.asked[k]["messages"][-1]["content"]
    return [block for block in content if block["type"] == "tool_result"]


def test_a_run_passes_and_counts_what_the_api_counted():
    with stand_in([WRITE, SUBMIT]) as server:
        run = generate(server)
    facts = run.summary()
    assert facts.passed and facts.turns == 2
    assert facts.input_tokens == 2 * USAGE["input_tokens"]
    assert facts.cost_usd == pytest.approx(2 * (1000 * 4 + 200 * 20) / 1e6)
    body = server.asked[0]
    assert body["system"][0]["cache_control"] == {"type": "ephemeral"}
    assert {"type": "bash_20250124", "name": "bash"} in body["tools"]
    assert "temperature" not in body and body["stream"]


def test_success_is_a_verdict_not_a_claim():
    claim = says(text("All phases pass, the engine is finished."))
    with stand_in([claim, WRITE, SUBMIT]) as server:
        run = generate(server)
    assert run.summary().passed and run.summary().turns == 3
    assert "only by a verdict" in server.asked[1]["messages"][-1]["content"][0]["text"]


def test_an_engine_that_never_passes_stops_at_its_attempts():
    def script(body):
        n = len(body["messages"])
        return says(create("bad = 1\n", index=n), use("submit_phase", n + 1))

    with stand_in(script) as server:
        run = generate(server, attempts=3)
    assert run.info.status == "stopped" and "refused 3 times" in run.info.reason
    assert run.summary().failed_verdicts == 3
    hints = server.asked[2]["messages"][-1]["content"][-1]["text"]
    assert "wrong-rope-or-heads" in hints and "refusals-and-edges" not in hints


def test_a_reply_cut_off_at_max_tokens_is_not_carried_out():
    cut = says(create("half"), stop_reason="max_tokens")
    with stand_in([cut, says(text("And so"), stop_reason="max_tokens"), WRITE, SUBMIT]) as server:
        run = generate(server)
    assert run.summary().passed
    assert "cut off" in results(server, 1)[0]["content"] and results(server, 1)[0]["is_error"]
    assert "half" not in run.turn(1).diff


def test_refusal_and_pause_and_full_context():
    with stand_in([says(text("no"), stop_reason="refusal")]) as server:
        run = generate(server, run_id="a")
    assert run.info.status == "stopped" and "refused" in run.info.reason
    paused = says(text("thinking"), stop_reason="pause_turn")
    with stand_in([paused, WRITE, SUBMIT]) as server:
        assert generate(server, fresh=True, run_id="b").summary().passed
    assert [m["role"] for m in server.asked[1]["messages"]] == ["user", "assistant"]
    full = says(text("so long"), stop_reason="model_context_window_exceeded")
    with stand_in([full, WRITE, SUBMIT]) as server:
        assert generate(server, fresh=True, run_id="c").summary().passed
    assert len(server.asked[1]["messages"]) == 1
    assert "starts afresh" in server.asked[1]["messages"][0]["content"][0]["text"]


def test_a_record_of_every_stop_reason_replays():
    said = {r: says(text(r), stop_reason=r) for r in ("pause_turn", "max_tokens", "end_turn")}
    full = says(text("so long"), stop_reason="model_context_window_exceeded")
    stop = says(text("so"), stop_reason="stop_sequence")
    cut = says(create("half"), stop_reason="max_tokens")
    with stand_in([*said.values(), cut, full, stop, WRITE, SUBMIT]) as server:
        run = generate(server)
    assert run.summary().passed and run.summary().turns == 8
    report = replay(run, judge=fake_judge(), on_event=lambda event: None)
    assert report.faithful and report.turns == 8


@pytest.mark.parametrize(
    "failure",
    [
        Refuse(429, "rate_limit_error", {"retry-after": "0"}),
        Refuse(529, "overloaded_error", {"retry-after-ms": "10"}),
        Drop(WRITE),
        Drop(WRITE, events=0),
        Drop(WRITE, kind="overloaded_error"),
        Garble(WRITE),
    ],
)
def test_a_busy_api_and_a_dropped_stream_are_asked_again(failure):
    with stand_in([failure, WRITE, SUBMIT]) as server:
        run = generate(server)
    assert run.summary().passed and run.summary().turns == 2
    assert server.asked[0]["messages"] == server.asked[1]["messages"]


def test_the_time_that_a_busy_api_asks_for_is_waited():
    begun = time.monotonic()
    with stand_in([Refuse(429, "rate_limit_error", {"retry-after": "1"}), WRITE, SUBMIT]) as server:
        assert generate(server).summary().passed
    assert time.monotonic() - begun >= 1  # the client alone would try again within half of that


def test_an_api_that_is_busy_for_long_is_waited_for():
    """Longer than the client's own two retries, when tokens are counted and when a reply is due."""
    busy = [Refuse(529, "overloaded_error", {"retry-after-ms": "1"})] * 4
    with stand_in([*busy, WRITE, SUBMIT]) as server:
        server.uncounted += busy
        run = generate(server)
    assert run.summary().passed and run.summary().turns == 2


@pytest.mark.parametrize("refused", ["count", "reply", "stream"])
def test_what_the_api_will_not_take_stops_the_run_in_one_line(refused):
    bad = Refuse(401, "authentication_error", message="invalid x-api-key")
    kind = "permission_error"
    with stand_in([Drop(WRITE, kind=kind) if refused == "stream" else bad]) as server:
        server.uncounted += [bad] if refused == "count" else []
        run = generate(server)
    word = kind if refused == "stream" else "invalid x-api-key"
    assert run.info.status == "stopped" and word in run.info.reason
    assert run.info.reason.startswith("the API refused") and run.summary().turns == 0
    assert len(server.asked) == (refused != "count")


def test_a_conversation_that_is_too_long_starts_afresh_and_replays():
    long = "prompt is too long: 200001 tokens > 200000 maximum"
    refused = Refuse(400, "invalid_request_error", message=long)
    with stand_in([says(create("bad = 1\n")), refused, WRITE, SUBMIT]) as server:
        run = generate(server)
    assert run.summary().passed and len(server.asked[2]["messages"]) == 1
    assert "starts afresh" in server.asked[2]["messages"][0]["content"][0]["text"]
    assert replay(run, judge=fake_judge(), on_event=lambda event: None).faithful
    with stand_in([refused]) as server:
        run = generate(server, fresh=True)  # of its first message nothing can be left out
    assert run.info.status == "stopped" and long in run.info.reason


def test_an_api_that_never_answers_stops_the_run():
    with stand_in(lambda body: Garble(WRITE)) as server:
        run = generate(server)
    assert run.info.status == "stopped" and "could be read" in run.info.reason
    assert len(server.asked) == loop.RETRIES + 1 and run.summary().turns == 0


@pytest.mark.parametrize("reason", ["end_turn", "stop_sequence"])
def test_a_reply_without_calls_is_told_what_ends_a_phase(reason):
    with stand_in([says(text("Done."), stop_reason=reason), WRITE, SUBMIT]) as server:
        assert generate(server).summary().passed
    assert "only by a verdict" in server.asked[1]["messages"][-1]["content"][0]["text"]


def test_a_bad_request_stops_the_run_and_a_later_call_goes_on():
    with stand_in([Refuse(400, "invalid_request_error")]) as server:
        run = generate(server)
    assert run.info.status == "stopped" and "refused the request" in run.info.reason
    with stand_in([WRITE, SUBMIT]) as server:
        assert generate(server).id == run.id and len(server.asked) == 2


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (use(EDITOR, command="create", path="../gates.py", file_text="x"), "relative"),
        (use(EDITOR, command="create", path="/etc/passwd", file_text="x"), "relative"),
        (use(EDITOR, command="view", path="a/../../run.json"), "relative"),
        (use(EDITOR, command="create", path=".hidden", file_text="x"), "hidden"),
        (use(EDITOR, command="create", path="a.py"), "file_text"),
        (use(EDITOR, command="undo_edit", path="a.py"), "undo_edit"),
        (use(EDITOR, command="create", path="big.py", file_text="x" * 300_000), "too large"),
        (use("run_gate", gates=["honesty"]), "no gate 'honesty'"),
        (use("run_gate", gates="logits"), "gates"),
        (use("inspect_kernel", target="sm_80"), "sm_90a"),
        (use("read_skill", name="../../spec"), "no skill"),
        (use("edit_gate", name="logits"), "no tool"),
        (use("submit_phase", passed=True), "passed"),
    ],
)
def test_what_a_tool_will_not_do_comes_back_as_an_error(call, word, local_runs):
    before = {path for path in local_runs.parent.rglob("*")}
    with stand_in([says(call), WRITE, SUBMIT]) as server:
        run = generate(server)
    answer = results(server, 1)[0]
    assert answer["is_error"] and word in answer["content"]
    assert run.summary().passed
    new = {p for p in local_runs.parent.rglob("*")} - before
    assert all(path.is_relative_to(run.folder) for path in new)


def test_the_key_never_enters_a_record():
    leak = says(text(f"the key is {KEY}"), create(f"# good {KEY}\n"))
    with stand_in([leak, SUBMIT, SUBMIT]) as server:
        run = generate(server)
    stored = "".join(p.read_text() for p in run.folder.rglob("*") if p.is_file())
    assert KEY not in stored and "<key>" in stored
    assert server.requests[0][1]["authorization"] == f"Bearer {KEY}"


def test_limits_are_kept_before_the_call_that_would_break_them():
    with stand_in([WRITE, SUBMIT]) as server:
        run = generate(server, budget_usd=0.01)
    assert run.info.reason.startswith("budget_usd") and server.asked == []
    with stand_in([WRITE, SUBMIT]) as server:
        run = generate(server, tokens=33_000)
    assert run.info.reason.startswith("tokens") and server.asked == []
    with stand_in([WRITE, SUBMIT]) as server:
        run = generate(server, wall_s=1e-9)
    assert run.info.reason.startswith("wall_s") and server.asked == []


def test_a_live_run_needs_a_key_and_a_budget(monkeypatch):
    with pytest.raises(InputError, match="budget_usd"):
        generation.generate(SPEC, "anthropic", judge=fake_judge())
    monkeypatch.delenv("ANTHROPIC_API_KEY")
    with pytest.raises(InputError, match="ANTHROPIC_API_KEY"):
        generation.generate(SPEC, "anthropic", budget_usd=1, judge=fake_judge())


def test_a_run_killed_at_any_line_resumes_to_the_same_tree(local_runs):
    """Cut the transcript after each line, and inside one: same tree, nothing asked twice."""
    script = [
        says(create("bad = 1\n"), use("submit_phase", 1)),
        says(
            use(EDITOR, 2, command="str_replace", path="__init__.py", old_str="bad", new_str="good")
        ),
        says(create("x = 2\n", "more.py", 3), use("submit_phase", 4)),
        says(use("submit_phase", 5)),
    ]
    with stand_in(script) as server:
        whole = generate(server, run_id="whole")
    lines = (whole.folder / "transcript.jsonl").read_text().splitlines(keepends=True)
    for cut in range(1, len(lines)):
        home = local_runs / "cut"
        home.mkdir(exist_ok=True)
        (home / "verdicts").mkdir(exist_ok=True)
        info = json.loads((whole.folder / "run.json").read_text()) | {
            "id": "cut",
            "status": "running",
        }
        (home / "run.json").write_text(json.dumps(info))
        (home / "spec.yaml").write_text((whole.folder / "spec.yaml").read_text())
        (home / "transcript.jsonl").write_text("".join(lines[:cut]) + lines[cut][: cut * 7])
        answered = sum('"role":"assistant"' in line for line in lines[:cut])
        with stand_in(script[answered:]) as server:
            run = generate(server, run_id="cut")
        assert run.info.tree == whole.info.tree and run.summary().passed
        assert len(server.asked) == len(script) - answered
        assert run.transcript.broken_link() is None

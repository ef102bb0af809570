"""The loop: look at the transcript's last line and do the one thing that it calls for.

Nothing is remembered beside the transcript, so a run that was killed at any moment goes on from its
last line: an answered request is never asked again, the engine's files are rebuilt from the edits.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from metainfer_lab.agent import prompts, review
from metainfer_lab.agent.budget import Budget, counted
from metainfer_lab.agent.editor import ToolError
from metainfer_lab.agent.phases import Phase
from metainfer_lab.agent.scrub import scrub_all
from metainfer_lab.agent.tools import (
    EDITOR,
    ENDINGS,
    REMOVE,
    SUBMIT,
    Result,
    Tools,
    apply_edit,
)
from metainfer_lab.agent.transcript import Block, Judgement, Line, Transcript
from metainfer_lab.agent.watch import status
from metainfer_lab.paths import tree_hash
from metainfer_lab.skills import Role, Skill, reachable, route
from metainfer_lab.spec import Spec

if TYPE_CHECKING:
    import anthropic
    from anthropic.types import Message

T = TypeVar("T")
MAX_TOKENS = 32_000
RETRIES, RETRY_S = 4, 2.0
BUSY = frozenset({"rate_limit_error", "overloaded_error", "api_error", "timeout_error"})
FAILURES_BEFORE_HINTS = 2
CACHED = {"cache_control": {"type": "ephemeral"}}
EMPTY = [{"type": "text", "text": "(an empty reply)"}]  # the API takes no empty message
SILENT = (None, EDITOR, REMOVE, SUBMIT)  # calls whose results the next phase has no use for


class Stopped(Exception):
    """The run cannot go on by itself; the text is the report for a person."""


@dataclass
class Loop:
    """One run of one spec: phases in order, an author, gates, and after them a reviewer if any.

    client: where the author's replies come from; reviewer: where the reviewer's do, None for none.
    """

    spec: Spec
    run_id: str
    phases: Sequence[Phase]
    transcript: Transcript
    tools: Tools
    client: anthropic.Anthropic
    model: str
    effort: str | None
    budget: Budget
    say: Callable[[str], None]
    reviewer: anthropic.Anthropic | None = None
    paid: bool = False
    after: Callable[[Line], None] = lambda line: None
    closing: list[Callable[[str], None]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Go on until the last phase has passed; Stopped or BudgetSpent says why it could not."""
        rebuild(self.transcript.lines, self.tools.engine)
        while self.step():
            pass

    def step(self) -> bool:
        """Do the next thing; False when every phase has passed."""
        last = self.transcript.last
        if last is None:
            self.open(self.phases[0], conversation=0)
        elif last.author == "assistant" and last.stop_reason != "pause_turn":
            self._answer(last)
        elif last.findings:
            self._send_back(last)
        elif last.findings is not None:
            return self._next_phase(last)
        elif last.submission and last.submission.passed:
            if self.reviewer is None:
                return self._next_phase(last)
            self._open_review(last)
        else:
            self._ask(last)
        return True

    def phase(self, name: str) -> Phase:
        """A phase by its name."""
        return next(phase for phase in self.phases if phase.name == name)

    def _open_review(self, last: Line) -> None:
        """Begin a fresh context that holds code and skills alone."""
        phase = self.phase(last.phase)
        shown = route(self.spec, phase.name, "reviewer", skills=self.tools.skills)
        task, engine = review.task(phase), self.tools.engine
        text = prompts.opening(task, self.spec, self.run_id, shown, (), engine)
        self.say(f"review of phase {phase.name}")
        self.tell(phase.name, last.conversation + 1, text, last.attempt, role="reviewer")

    def _send_back(self, last: Line) -> None:
        """The findings go to the implementer's conversation; after too many, to a person."""
        rejections, findings = self.transcript.rejections(last.phase), last.findings or []
        if len(rejections) >= self.budget.rejections:
            raise Stopped(review.report(last.phase, rejections))
        told = max(line.n for line in self.transcript.lines if line.role == "implementer")
        conversation = self.transcript.lines[told].conversation
        visible = route(self.spec, last.phase, "reviewer", skills=self.tools.skills)
        many = len(rejections) >= review.REJECTIONS_BEFORE_HINTS
        hints = review.matching(findings, visible) if many else []
        self.say(f"phase {last.phase} sent back: {len(findings)} findings")
        text = review.returned(findings, hints)
        self.tell(last.phase, conversation, text, last.attempt + 1)

    def _next_phase(self, last: Line) -> bool:
        following = self.phases[self.phases.index(self.phase(last.phase)) + 1 :]
        self.say(f"phase {last.phase} passed (attempt {last.attempt})")
        if following:
            earlier = f"Phase `{last.phase}` has passed; its gates stay in force."
            self.open(following[0], last.conversation + 1, earlier + self._besides())
        return bool(following)

    def _besides(self) -> str:
        """What the reply that passed a phase was told beside its verdict, for the next context."""
        lines = self.transcript.lines
        judged = max(line.n for line in lines if line.submission)
        names = {call["id"]: call["name"] for call in lines[judged - 1].calls}
        told = [b for b in lines[judged].blocks if names.get(b.get("tool_use_id")) not in SILENT]
        said = "\n\n".join(f"[{names[b['tool_use_id']]}]\n{b['content']}" for b in told)
        return f" The reply that passed it was also told:\n\n{prompts.clip(said)}" if said else ""

    def open(self, phase: Phase, conversation: int, earlier: str = "") -> None:
        """Begin a conversation of a fresh context with a phase's task."""
        others = [s for s in self.visible() if s.name not in phase.skills]
        shown = [skill for skill in self.tools.skills.values() if skill.name in phase.skills]
        task = prompts.task(phase, self.phases, earlier)
        text = prompts.opening(task, self.spec, self.run_id, shown, others, self.tools.engine)
        self.say(f"phase {phase.name}: {', '.join(phase.gates)}")
        self.tell(phase.name, conversation, text)

    def visible(self) -> list[Skill]:
        """Skills that an author may read from the start: all of the spec but those on failures."""
        skills = reachable(self.spec, self.tools.skills)
        return [skill for skill in skills if skill.layer != "failures"]

    def tell(
        self, phase: str, conversation: int, text: str, attempt: int = 1, **fields: Any
    ) -> None:
        """Add a message of the loop's own."""
        message = {"role": "user", "content": text}
        where = {"conversation": conversation, "phase": phase, "attempt": attempt}
        self.append(message=message, **where, **fields)

    def append(self, *, seconds: float = 0.0, **fields: Any) -> None:
        """Add a line to the transcript, with the hash of the tree as it now is."""
        tree = tree_hash(self.tools.engine)
        self.after(self.transcript.append(tree=tree, seconds=round(seconds, 3), **fields))

    def _ask(self, last: Line) -> None:
        """Send the conversation and store the reply, before anything is done with it."""
        begun = time.monotonic()
        reply = self._reply(self._request(last), last.role)
        content = scrub_all([block.to_dict() for block in reply.content], self.tools.names)
        content = content or EMPTY
        self.append(
            seconds=time.monotonic() - begun,
            conversation=last.conversation,
            phase=last.phase,
            attempt=last.attempt,
            role=last.role,
            message={"role": "assistant", "content": content},
            stop_reason=reply.stop_reason,
            model=reply.model if self.paid else None,
            usage=counted(reply.usage) if self.paid else None,
        )
        self.say(status(self.transcript.lines))

    def _request(self, last: Line) -> dict[str, Any]:
        """What is sent: the stable prefix first (tools, rules, task), marked for the cache."""
        messages = self.transcript.messages(last.conversation)
        rules = prompts.SYSTEM if last.role == "implementer" else review.SYSTEM
        request: dict[str, Any] = {
            "model": self.model,
            "system": [{"type": "text", "text": rules, **CACHED}],
            "tools": self.tools.definitions(last.role),
            "messages": [*messages[:-1], _cached(messages[-1])],
        }
        if self.effort:
            request |= {"output_config": {"effort": self.effort}, "thinking": {"type": "adaptive"}}
        return request

    def _reply(self, request: dict[str, Any], role: Role) -> Message:
        """One reply within the budget; where the API takes the conversation no more, one that says
        so."""
        import anthropic

        client = self.client if role == "implementer" else self.reviewer
        if client is None:
            raise Stopped("a review has begun and no reviewer is there; say where it answers")

        def streamed() -> Message:
            with client.messages.stream(max_tokens=MAX_TOKENS, **request) as stream:
                return stream.get_final_message()

        try:
            known = self._count(client, request) if self.paid else 0
            self.budget.check(self.transcript.lines, self.started, known, MAX_TOKENS, self.model)
            return self._patiently(streamed)
        except anthropic.APIStatusError as error:
            if not (_too_long(error) and len(request["messages"]) > 1):
                raise Stopped(f"the API refused the request: {error.message}") from error
            return _overflow(self.model)

    def _count(self, client: anthropic.Anthropic, request: dict[str, Any]) -> int:
        return self._patiently(lambda: client.messages.count_tokens(**request)).input_tokens

    def _patiently(self, call: Callable[[], T]) -> T:
        """What the API answers, asked again while it is busy after the SDK's own retries, breaks
        off (the SDK retries only starts) or sends what is no JSON."""
        import anthropic
        import httpx2

        for retry in range(RETRIES + 1):
            try:
                return call()
            except (anthropic.APIConnectionError, httpx2.TransportError, ValueError) as error:
                last: Exception = error
            except anthropic.APIStatusError as error:
                if error.status_code < 500 and error.type not in BUSY:
                    raise
                last = error
            if retry < RETRIES:
                time.sleep(RETRY_S * 2**retry)
        why = f"{last} {last.__cause__ or ''}".strip()
        raise Stopped(f"no reply of the API could be read: {why}") from last

    def _answer(self, reply: Line) -> None:
        """Carry out a reply's calls, in order, and store their results as one message."""
        match reply.stop_reason:
            case "refusal":
                raise Stopped(f"the {reply.role} refused in phase {reply.phase}")
            case "model_context_window_exceeded" if reply.role == "reviewer":
                self._open_review(reply)
                return
            case "model_context_window_exceeded":
                earlier = "The conversation outgrew the context; this one starts afresh."
                self.open(self.phase(reply.phase), reply.conversation + 1, earlier)
                return
        begun, results = time.monotonic(), self._carry_out(reply)
        judged = [result.judgement for _, result in results if result.judgement]
        findings = [result.findings for _, result in results if result.findings is not None]
        submitted = next((j for j in judged if j.submission), None)
        refused = submitted if submitted and not submitted.passed else None
        blocks = [_tool_result(block, result) for block, result in results]
        self.append(
            seconds=time.monotonic() - begun,
            conversation=reply.conversation,
            phase=reply.phase,
            attempt=reply.attempt + bool(refused),
            role=reply.role,
            message={"role": "user", "content": [*blocks, *self._remarks(reply, results, refused)]},
            judgements=judged,
            findings=findings[-1] if findings else None,
        )
        if refused and reply.attempt >= self.budget.attempts:
            raise Stopped(f"phase {reply.phase} was refused {reply.attempt} times")

    def _carry_out(self, reply: Line) -> list[tuple[Block, Result]]:
        allowed, phase = executed(reply), self.phase(reply.phase)
        results = []
        for block in reply.calls:
            if block in allowed:
                self.say(f"  {_summary(block)}")
                results.append((block, self.tools.call(block, phase, reply.role)))
            else:
                why = prompts.CUT_OFF if reply.stop_reason == "max_tokens" else prompts.NOT_LAST
                results.append((block, Result(why, is_error=True)))
        return results

    def _remarks(
        self, reply: Line, results: list[tuple[Block, Result]], refused: Judgement | None
    ) -> list[Block]:
        """What the loop says beside the results: nothing was called, or skills on failures."""
        if not results:
            missing = prompts.NO_CALL if reply.role == "implementer" else review.NO_CALL
            text = prompts.CUT_OFF if reply.stop_reason == "max_tokens" else missing
            return [{"type": "text", "text": text}]
        if not refused or reply.attempt < FAILURES_BEFORE_HINTS:
            return []
        hints = route(self.spec, reply.phase, failed=refused.failed, skills=self.tools.skills)
        text = "\n\n".join(str(skill) for skill in hints if skill.layer == "failures")
        return [{"type": "text", "text": f"Skills on such failures:\n\n{text}"}] if text else []


def _too_long(error: anthropic.APIStatusError) -> bool:
    """Whether the API refused a conversation for its length (it has no code for that)."""
    return error.status_code == 413 or "prompt is too long" in error.message


def _overflow(model: str) -> Message:
    """What the record holds in place of a reply that no context had room for."""
    from anthropic.types import Message, Usage

    about = {"id": "", "type": "message", "role": "assistant", "model": model, "content": []}
    usage = Usage(input_tokens=0, output_tokens=0)
    return Message(stop_reason="model_context_window_exceeded", usage=usage, **about)


def executed(reply: Line) -> list[Block]:
    """The calls of a reply that are carried out: none of one cut off, none after a submission."""
    if reply.stop_reason == "max_tokens":
        return []
    ends = (i + 1 for i, block in enumerate(reply.calls) if block["name"] in ENDINGS)
    return reply.calls[: next(ends, None)]


def rebuild(lines: Iterable[Line], engine: Path) -> None:
    """Make the engine's folder from a transcript: every answered edit, in order, from nothing.

    A line that restores an earlier one begins with the tree of that.
    """
    lines = list(lines)
    shutil.rmtree(engine, ignore_errors=True)
    engine.mkdir(parents=True)
    unanswered = lines[-1:] if lines and lines[-1].author == "assistant" else []
    for line in lines[: len(lines) - len(unanswered)]:
        if line.restores is not None:
            rebuild(lines[: line.restores + 1], engine)
        if line.author == "assistant" and line.role == "implementer":
            for block in executed(line):
                _repeat(engine, block)


def _repeat(engine: Path, block: Block) -> None:
    """Repeat an edit; one that was refused then is refused now."""
    if block["name"] in (EDITOR, REMOVE):
        with suppress(ToolError, ValidationError):
            apply_edit(engine, block["name"], block["input"])


@contextmanager
def tree_of(lines: Iterable[Line]) -> Iterator[Path]:
    """The engine's files as lines of a transcript leave them, in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="tree-") as scratch:
        folder = Path(scratch).resolve() / "engine"
        rebuild(lines, folder)
        yield folder


def _cached(message: dict[str, Any]) -> dict[str, Any]:
    """A user message whose last block ends the cached prefix; a paused reply as it was."""
    if message["role"] == "assistant":
        return message
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    return {**message, "content": [*blocks[:-1], {**blocks[-1], **CACHED}]}


def _tool_result(block: Block, result: Result) -> Block:
    text = result.text or "(no output)"
    answer = {"type": "tool_result", "tool_use_id": block["id"], "content": text}
    return answer | ({"is_error": True} if result.is_error else {})


def _summary(block: Block) -> str:
    """A call in a few words; an edit goes by its command alone."""
    given = block["input"] if isinstance(block["input"], dict) else {}
    said = [str(given[key]) for key in ("command", "gates", "name", "path") if given.get(key)]
    words = [] if block["name"] == EDITOR and said else [block["name"]]
    return " ".join([*words, *(text.splitlines()[0][:80] for text in said)])

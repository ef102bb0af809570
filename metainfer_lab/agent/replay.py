"""A recorded run carried out again: tools for real, gates for real where asked, differences listed.

The loop is the one that made the record; only replies come from the transcript. It follows the
record even after a divergence, so that every divergence is found, not the first alone.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from metainfer_lab.agent.budget import Budget
from metainfer_lab.agent.loop import Loop, Stopped, rebuild
from metainfer_lab.agent.phases import Phase
from metainfer_lab.agent.providers import ReplayTransport, client
from metainfer_lab.agent.tools import EDITOR, REMOVE, REVIEW, Judge, Result, Tools, real_judge
from metainfer_lab.agent.transcript import Block, Judgement, Line
from metainfer_lab.agent.watch import say_plainly
from metainfer_lab.errors import InputError
from metainfer_lab.skills import Role, route
from metainfer_lab.spec import Spec

if TYPE_CHECKING:
    from metainfer_lab.agent.run import Run

MACHINE_BOUND = frozenset({"speed"})  # gates whose outcome may differ from machine to machine


class Divergence(BaseModel):
    """One thing that came out another way than the record says."""

    turn: int
    phase: str
    kind: Literal["tree", "verdict", "record"]
    recorded: str
    found: str

    def __str__(self) -> str:
        return (
            f"turn {self.turn}, phase {self.phase}: {self.kind} was {self.recorded}, "
            f"now {self.found}"
        )


class Report(BaseModel):
    """What a replay did: turns, gates that ran for real with their outcome, divergences."""

    run: str
    phases: list[str]
    turns: int = 0
    gates: list[dict[str, Any]] = []
    divergences: list[Divergence] = []

    @property
    def faithful(self) -> bool:
        """Whether everything came out as recorded."""
        return not self.divergences

    def __str__(self) -> str:
        real = len(self.gates)
        head = f"replay of {self.run}: {self.turns} turns, {real} gates run for real, "
        return "\n".join(
            [f"{head}{len(self.divergences)} divergences", *map(str, self.divergences)]
        )


@dataclass
class ReplayTools(Tools):
    """Tools that carry out edits and reviews always, the rest in the chosen phases, and otherwise
    as recorded.

    Gates that run are compared with the record; the loop is given the recorded outcome.
    """

    recorded: list[Line] = field(default_factory=list)
    report: Report = field(default_factory=lambda: Report(run="", phases=[]))
    folder: Path = Path()

    def call(self, block: Block, phase: Phase, role: Role = "implementer") -> Result:
        """Carry out a call, and answer it as the record does where the outcome must not differ."""
        if block["name"] in (EDITOR, REMOVE, REVIEW):
            return super().call(block, phase, role)
        answer, judgement = self._recorded(block)
        if phase.name in self.report.phases:
            result = self._again(block, phase, role, judgement)
            if result.judgement is None and judgement is None:
                return result
            self._compare(phase, judgement, result.judgement)
        return Result(answer["content"], answer.get("is_error", False), judgement)

    def _again(self, block: Block, phase: Phase, role: Role, judgement: Judgement | None) -> Result:
        """The call for real; a submission asks the gates that it asked when it was recorded."""
        then = replace(phase, gates=tuple(judgement.gates)) if judgement else phase
        return super().call(block, then, role)

    def _recorded(self, block: Block) -> tuple[Block, Judgement | None]:
        """The recorded result of a call, and the judgement that came with it."""
        for line in self.recorded:
            for answer in line.blocks:
                if answer.get("tool_use_id") == block["id"]:
                    found = (j for j in line.judgements if j.call == block["id"])
                    return answer, next(found, None)
        raise InputError(f"run {self.report.run}: call {block['id']} has no recorded result")

    def _compare(self, phase: Phase, before: Judgement | None, now: Judgement | None) -> None:
        then, found = self._outcomes(self.folder, before), self._outcomes(self.verdicts, now)
        for gate in sorted((then | found).keys() - MACHINE_BOUND):
            if then.get(gate) != found.get(gate):
                self.diverged(
                    phase.name, "verdict", f"{gate} {then.get(gate)}", f"{gate} {found.get(gate)}"
                )

    def _outcomes(self, folder: Path, judgement: Judgement | None) -> dict[str, str]:
        """Gate -> status of a stored verdict; one entry for gates that could not even start."""
        if judgement is None or judgement.file is None:
            return {"start": "refused" if judgement else "absent"}
        verdict = json.loads((folder / judgement.file).read_text())
        outcomes = {gate["gate"]: gate["status"] for gate in verdict["gates"]}
        outcomes["all"] = "pass" if judgement.passed else "fail"
        if MACHINE_BOUND & outcomes.keys():
            del outcomes["all"]
        if folder == self.verdicts:
            self.report.gates += [
                {
                    key: gate.get(key)
                    for key in ("gate", "status", "cases", "worst_error", "tolerance")
                }
                for gate in verdict["gates"]
            ]
        return outcomes

    def compare_line(self, line: Line) -> None:
        """Compare the tree after a line with the record's."""
        self.report.turns += line.author == "assistant"
        then = self.recorded[line.n]
        if line.tree != then.tree:
            self.diverged(line.phase, "tree", then.tree[:12], line.tree[:12])

    def diverged(self, phase: str, kind: Any, recorded: str, found: str) -> None:
        """Note that something came out another way, and say so at once."""
        divergence = Divergence(
            turn=self.report.turns, phase=phase, kind=kind, recorded=recorded, found=found
        )
        self.report.divergences.append(divergence)
        self.say(f"divergence: {divergence}")


def replay(
    run: Run,
    chosen: Sequence[str] | None = None,
    *,
    on_event: Callable[[str], None] | None = None,
    judge: Judge | None = None,
) -> Report:
    """Carry a run out again in a fresh folder; gates run for real in the chosen phases (all: None).

    A divergence is another tree after a turn, another outcome of a gate (speed apart), or a record
    whose chain is broken. InputError for a phase that the run does not have.
    """
    names = list(dict.fromkeys(line.phase for line in run.transcript.lines))
    wanted = names if chosen is None else list(chosen)
    if unknown := set(wanted) - set(names):
        raise InputError(f"phases: run {run.id} has no {min(unknown)!r}; it has {', '.join(names)}")
    report, say = Report(run=run.id, phases=wanted), on_event or say_plainly
    with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
        home = Path(scratch).resolve()
        loop = _loop(run, report, home, judge or real_judge(run.spec), say)
        _follow(loop, len(run.transcript.lines))
    say(str(report))
    return report


def _loop(run: Run, report: Report, home: Path, judge: Judge, say: Callable[[str], None]) -> Loop:
    """The loop that made the record, over a transport that gives the recorded replies."""
    from metainfer_lab.agent.generation import loop_of, tools_of

    for name in ("run.json", "spec.yaml"):
        shutil.copyfile(run.folder / name, home / name)
    record, verdicts = run.transcript, run.folder / "verdicts"
    lines, most = record.lines, len(record.lines) + 1
    given = vars(tools_of(run.spec, home, judge, say))
    tools = ReplayTools(**given, recorded=lines, report=report, folder=verdicts)
    if (broken := record.broken_link()) is not None:
        tools.diverged(lines[broken].phase, "record", "a whole chain", f"broken at line {broken}")
    budget = Budget(turns=most, attempts=most, rejections=most)
    other = {"tools": tools, "after": tools.compare_line, "paid": False}
    loop = loop_of(home, judge, budget, say, phases=_phases(run.spec, lines), **other)
    replies = record.replies()
    loop.client = client(ReplayTransport(replies, lambda: len(loop.transcript.replies())))
    loop.reviewer = loop.client if any(reply.role == "reviewer" for reply in replies) else None
    return loop


def _phases(spec: Spec, lines: Sequence[Line]) -> list[Phase]:
    """The phases that a record went through, ended by the gates that it was ended by then."""
    gates = {line.phase: () for line in lines}
    gates |= {line.phase: tuple(line.submission.gates) for line in lines if line.submission}
    return [
        Phase(name, "", tuple(skill.name for skill in route(spec, name)), own, ())
        for name, own in gates.items()
    ]


def _follow(loop: Loop, length: int) -> None:
    """Step until the transcript is as long as the record."""
    rebuild([], loop.tools.engine)
    while len(loop.transcript.lines) < length:
        try:
            if not loop.step():
                return
        except Stopped:
            return

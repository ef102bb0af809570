"""A run: one generation, recorded or going on, as a folder that says everything about itself.

run.json  spec.yaml  transcript.jsonl  verdicts/NNNN.json     and, while it runs, engine/  lock
"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from metainfer_lab.agent.budget import total_cost
from metainfer_lab.agent.loop import tree_of
from metainfer_lab.agent.transcript import FILE, Finding, Judgement, Line, Transcript
from metainfer_lab.agent.turns import diff, lines_of_code, row
from metainfer_lab.errors import InputError
from metainfer_lab.paths import ENGINES, LOCAL, RUNS, write_atomic
from metainfer_lab.spec import Spec

if TYPE_CHECKING:
    import pandas as pd

    from metainfer_lab.agent.replay import Report

LOCAL_RUNS = LOCAL / "runs"
Status = Literal["running", "passed", "stopped"]
Kind = Literal["generation", "optimisation"]
AUTHORS = {
    "file": "coding agent through the file provider, model not stated",
    "external": "external coding agent, model not stated",
}


class RunInfo(BaseModel):
    """What a run says of itself beside its transcript."""

    model_config = ConfigDict(extra="forbid")

    id: str
    spec: str
    kind: Kind = "generation"
    provider: str
    author: str
    reviewer: str = "none"
    model: str | None = None
    effort: str | None = None
    created: str
    status: Status = "running"
    reason: str | None = None
    tree: str | None = None
    versions: dict[str, str] = {}
    confined_by: str = "instruction: the author was given the laid-out workspace alone"
    notes: list[str] = []


class Summary(BaseModel):
    """What `generate --json` prints."""

    id: str
    spec: str
    passed: bool
    status: Status
    reason: str | None
    provider: str
    author: str
    reviewer: str
    turns: int
    attempts: int
    failed_verdicts: int
    rejections: int
    divergences: int
    lines_of_code: int
    input_tokens: int | None
    output_tokens: int | None
    cost_usd: float | None
    seconds: float
    tree: str


@dataclass(frozen=True)
class Turn:
    """One reply and what came of it: what was asked, the calls, the diff, what the gates said."""

    number: int
    role: str
    phase: str
    attempt: int
    time: str
    asked: str
    said: str
    calls: list[dict[str, Any]]
    results: list[dict[str, Any]]
    diff: str
    judgements: list[Judgement]
    findings: list[Finding] | None
    tree: str

    def __str__(self) -> str:
        head = (
            f"turn {self.number}, {self.role}, phase {self.phase}, attempt {self.attempt}, "
            f"{self.time}"
        )
        gates = [
            f"{', '.join(j.gates)}: {'passed' if j.passed else 'failed'}" for j in self.judgements
        ]
        names = ", ".join(call["name"] for call in self.calls)
        found = [str(finding) for finding in self.findings or []]
        return "\n".join([head, f"calls: {names or 'none'}", *gates, *found, self.diff])


class Run:
    """Reads a run's folder; `open` finds it by its id, or the best recorded run of a spec."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.info = RunInfo.model_validate_json((folder / "run.json").read_text())
        self.report: Report | None = None

    @classmethod
    def open(cls, name: str) -> Run:
        """A run by id, or by spec id: the generation that made its engine, else the latest one."""
        for root in (RUNS, LOCAL_RUNS):
            if (root / name / "run.json").is_file():
                return cls(root / name)
        made = _maker(name)
        found = [made] if made else [r.id for r in runs(name) if r.info.kind == "generation"]
        if not found:
            known = ", ".join(dict.fromkeys(run.info.spec for run in runs())) or "none yet"
            said = f"run {name}: no such run or spec with a run; these specs have one: {known}"
            raise InputError(f"{said}. Providers anthropic and file make one; so does a workspace")
        return cls.open(found[-1])

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def spec(self) -> Spec:
        return Spec.load(self.folder / "spec.yaml")

    @property
    def transcript(self) -> Transcript:
        """The transcript as it stands on the disk now (a running run grows)."""
        return Transcript(self.folder / FILE)

    @property
    def verdicts(self) -> dict[str, dict[str, Any]]:
        """Every stored verdict by file name, in order."""
        paths = sorted((self.folder / "verdicts").glob("*.json"))
        return {path.name: json.loads(path.read_text()) for path in paths}

    @property
    def cost(self) -> float | None:
        """US dollars; None where no API said a usage."""
        return total_cost(self.transcript.lines)

    @cached_property
    def _turns(self) -> list[tuple[Line, Line, Line | None]]:
        lines = self.transcript.lines
        return [
            (lines[i - 1], line, lines[i + 1] if i + 1 < len(lines) else None)
            for i, line in enumerate(lines)
            if line.author == "assistant"
        ]

    def turn(self, number: int) -> Turn:
        """Turn `number`, from 1: what was asked, the calls, the diff, what the gates said."""
        if not 1 <= number <= len(self._turns):
            raise InputError(f"turn {number}: run {self.id} has turns 1 to {len(self._turns)}")
        asked, reply, results = self._turns[number - 1]
        return Turn(
            number=number,
            role=reply.role,
            phase=reply.phase,
            attempt=reply.attempt,
            time=reply.time,
            asked="\n".join(b.get("text") or str(b.get("content")) for b in asked.blocks),
            said="\n".join(b["text"] for b in reply.blocks if b["type"] == "text"),
            calls=reply.calls,
            results=results.blocks if results else [],
            diff=self._diff(reply),
            judgements=results.judgements if results else [],
            findings=results.findings if results else None,
            tree=results.tree if results else reply.tree,
        )

    def _diff(self, reply: Line) -> str:
        lines = self.transcript.lines
        with tree_of(lines[: reply.n + 1]) as before, tree_of(lines[: reply.n + 2]) as after:
            return diff(before, after)

    def timeline(self) -> pd.DataFrame:
        """One row a turn: time, phase, attempt, calls, gates and their outcome, lines, tokens."""
        import pandas as pd

        return pd.DataFrame([row(i, *turn[1:]) for i, turn in enumerate(self._turns, 1)])

    def summary(self) -> Summary:
        """Attempts, verdicts, tokens, cost, size and time of the run."""
        lines = self.transcript.lines
        usages = [line.usage for line in lines if line.usage]
        said = sum(usage["output_tokens"] for usage in usages)
        judged = [j for line in lines for j in line.judgements]
        with tree_of(lines) as engine:
            size = lines_of_code(engine)
        return Summary(
            passed=self.info.status == "passed" and not (self.report and self.report.divergences),
            turns=sum(line.author == "assistant" for line in lines),
            attempts=sum(j.submission for j in judged),
            failed_verdicts=sum(not j.passed for j in judged),
            rejections=sum(bool(line.findings) for line in lines),
            divergences=len(self.report.divergences) if self.report else 0,
            lines_of_code=size,
            input_tokens=sum(map(sum, map(dict.values, usages))) - said if usages else None,
            output_tokens=said if usages else None,
            cost_usd=self.cost,
            seconds=round(sum(line.seconds for line in lines), 1),
            tree=lines[-1].tree if lines else "",
            **self.info.model_dump(
                include={"id", "spec", "status", "reason", "provider", "author", "reviewer"}
            ),
        )

    def replay(self, phases: Sequence[str] | None = None, **options: Any) -> Report:
        """Carry the tool calls out again, gates for real in `phases`; divergences are listed."""
        from metainfer_lab.agent.replay import replay

        if self.info.kind != "generation":
            raise InputError(f"run {self.id}: is an optimisation; optimise({self.id!r}) replays it")
        self.report = replay(self, phases, **options)
        return self.report

    def model_dump_json(self, indent: int | None = None) -> str:
        """The summary as JSON."""
        return self.summary().model_dump_json(indent=indent)

    def __str__(self) -> str:
        facts = self.summary()
        text = (
            f"run {facts.id}: {facts.status}, {facts.turns} turns, {facts.attempts} submissions, "
            f"{facts.failed_verdicts} failed verdicts, {facts.lines_of_code} lines, "
            f"{facts.seconds:.0f} s\n"
            f"author: {facts.author}; reviewer: {facts.reviewer}"
        )
        return f"{text}\n{facts.reason}" if facts.reason else text


def runs(spec: str | None = None) -> list[Run]:
    """Every run, recorded ones first, by id; of one spec if named."""
    folders = [p.parent for root in (RUNS, LOCAL_RUNS) for p in sorted(root.glob("*/run.json"))]
    found = {folder.name: Run(folder) for folder in reversed(folders)}
    chosen = [run for run in found.values() if spec is None or run.info.spec == spec]
    return sorted(chosen, key=lambda run: _natural(run.id))


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def next_id(spec: str, letter: str = "r") -> str:
    """The first free id of a spec's runs: <spec>-r1, -r2, …"""
    names = {path.parent.name for root in (RUNS, LOCAL_RUNS) for path in root.glob("*/run.json")}
    return next(name for n in range(1, 10_000) if (name := f"{spec}-{letter}{n}") not in names)


def _maker(spec: str) -> str | None:
    """The recorded generation that made the engine which serves a spec, if one did."""
    path = ENGINES / spec / "engine.json"
    name = json.loads(path.read_text()).get("run") if path.is_file() else None
    recorded = name and (RUNS / name / "run.json").is_file()
    return name if recorded and Run(RUNS / name).info.kind == "generation" else None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's folder alone; InputError when another process has it."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"run {folder.name}: another process is running it") from None
        yield


def save(folder: Path, info: RunInfo) -> None:
    """Write run.json."""
    write_atomic(folder / "run.json", info.model_dump_json(indent=1, exclude_none=True) + "\n")

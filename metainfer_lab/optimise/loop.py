"""The loop of an optimisation: one attempt after the other, each from a kept tree.

The transcript says what was asked and answered, the raw files what was measured, the ledger what
was decided. Each step looks at these and does the next thing, so a run that was killed goes on
where it stood: no row is lost, none is written twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from metainfer_lab.agent.editor import ToolError
from metainfer_lab.agent.loop import CACHED, Loop, Stopped, rebuild, tree_of
from metainfer_lab.agent.phases import Phase
from metainfer_lab.agent.prompts import opening
from metainfer_lab.agent.tools import Result, calls, creations
from metainfer_lab.agent.transcript import Block as Content
from metainfer_lab.agent.transcript import Judgement, Line
from metainfer_lab.agent.turns import diff
from metainfer_lab.bench import ledger, results
from metainfer_lab.engine.manifest import FILE as MANIFEST
from metainfer_lab.optimise import prompts, search
from metainfer_lab.optimise.bench import Bench, Broken
from metainfer_lab.optimise.desk import files_of
from metainfer_lab.optimise.records import MAIN, OBJECTIVE, Block, Profile, Proposal, Settings
from metainfer_lab.optimise.search import BASELINE, FINAL, Row
from metainfer_lab.optimise.size import code_lines
from metainfer_lab.optimise.tools import OptimiserTools
from metainfer_lab.optimise.trial import Events, Trial, baseline, final
from metainfer_lab.paths import tree_hash, write_atomic

START, ATTEMPT = "start", "attempt-"
SHOWN = ("measurement",)  # skills given in full; of the deployment's layer all are
QUICK_BLOCKS = 4
LEDGER = "ledger.tsv"


@dataclass
class Search(Loop):
    """One optimisation. source: the engine to begin with; home: the run's folder."""

    tools: OptimiserTools
    settings: Settings = field(kw_only=True)
    bench: Bench = field(kw_only=True)
    home: Path = field(kw_only=True)
    source: Path = field(kw_only=True)

    def __post_init__(self) -> None:
        self.tools.judged, self.tools.quick = self._propose, self._measure

    def step(self) -> bool:
        """Do the next thing; False when the run has ended by a rule of its own."""
        last = self.transcript.last
        if last is None:
            text = prompts.start_text(self.settings.start_run, self.settings.start_tree)
            self.tell(START, 0, text)
        elif last.author == "assistant" and last.stop_reason != "pause_turn":
            self._answer(last)
        elif last.n == 0:
            self._lay_out(last)
        elif last.phase == FINAL:
            return self._ended(last)
        elif last.phase == START:
            self._baseline(last)
        elif self._number(last.phase) in {row["id"] for row in self.rows()}:
            self._go_on(last)
        else:
            self._ask(last)
        return True

    @property
    def waits(self) -> bool:
        """Whether the next thing to come is a proposal."""
        last = self.transcript.last
        if last is None or last.author != "user" or not last.phase.startswith(ATTEMPT):
            return False
        return self._number(last.phase) not in {row["id"] for row in self.rows()}

    def rows(self) -> list[Row]:
        """The ledger's rows so far, nulls as None."""
        return read_rows(self.home / LEDGER)

    def phase(self, name: str) -> Phase:
        """An attempt as a phase: every skill may be read, no gate ends it."""
        return Phase(name, "", (), (), ())

    def open(self, phase: Phase, conversation: int, earlier: str = "") -> None:
        """Begin an attempt's conversation anew; what it has changed so far stays."""
        self.tell(phase.name, conversation, self._opening(phase.name, self._parent(phase.name)))

    def _request(self, last: Line) -> dict[str, Any]:
        rules = [{"type": "text", "text": prompts.SYSTEM, **CACHED}]
        return super()._request(last) | {"system": rules}

    def _remarks(
        self, reply: Line, results: list[tuple[Content, Result]], *rest: Any
    ) -> list[Content]:
        if not results and reply.stop_reason != "max_tokens":
            return [{"type": "text", "text": prompts.NO_CALL}]
        return super()._remarks(reply, results, *rest)

    # the start

    def _lay_out(self, last: Line) -> None:
        """The start's files as one reply of edits, so that every tree follows from the record."""
        if tree_hash(self.source) != self.settings.start_tree:
            raise Stopped(f"{self.source}: has changed since the run began with it")
        gates = ("run_gate", {"gates": list(self.tools.judge.gates)})
        content = calls([*creations(files_of(self.source, self.run_id)), gates], "toolu_start")
        message, where = {"role": "assistant", "content": content}, {"phase": START, "attempt": 1}
        self.append(message=message, stop_reason="tool_use", conversation=0, **where)

    def _baseline(self, last: Line) -> None:
        judgement = last.judgements[-1]
        if not judgement.passed:
            failed = ", ".join(judgement.failed) or judgement.error
            raise Stopped(f"the engine to begin with does not pass its gates ({failed})")
        if not self.rows():
            self.say("row 0: the start against itself")
            trial, folder = self._trial(BASELINE), self.tools.engine
            trial.events.event("floor", self.bench.floor)
            row = baseline(trial, folder, code_lines(folder))
            gates = f"{', '.join(judgement.gates)}: passed"
            self._append(BASELINE, row | {"hypothesis": "the start", "gates": gates})
        self._go_on(last)

    # an attempt

    def _go_on(self, last: Line) -> None:
        rows = self.rows()
        following = search.next_attempt(rows, self.settings, self._share(search.best(rows)))
        if following.parent is None:
            self._finish(following.stop or "", last)
            return
        name = f"{ATTEMPT}{len(search.attempts(rows)) + 1}"
        restored = self._end_of(following.parent)
        rebuild(self.transcript.lines[: restored + 1], self.tools.engine)
        self.say(f"{name} from row {following.parent}")
        text = self._opening(name, following.parent)
        self.tell(name, last.conversation + 1, text, restores=restored)

    def _opening(self, name: str, parent: str) -> str:
        rows, skills = self.rows(), self.visible()
        shown = [s for s in skills if s.name in SHOWN or s.layer == "3-deployment"]
        others = [s for s in skills if s not in shown]
        touched = {row["id"]: changed_files(self.home / (row["diff"] or "")) for row in rows}
        assumed = {row["id"]: self._assumed(row["id"]) for row in search.attempts(rows)}
        again = search.worth_another_look(rows, touched, assumed)
        number, profile = self._number(name), self._profile(parent)
        task = prompts.task(self.settings, number, parent, rows, profile, again)
        return opening(task, self.spec, self.run_id, shown, others, self.tools.engine)

    def _propose(self, proposal: Proposal, phase: Phase) -> Result:
        """Judge a proposal; one that was judged before a kill is only told again."""
        name, parent = self._number(phase.name), self._parent(phase.name)
        trial = self._trial(name)
        known = next((row for row in self.rows() if row["id"] == name), None)
        row = known or self._tried(trial, name, parent, proposal)
        return Result(prompts.outcome(row), judgement=self._judgement(trial))

    def _tried(self, trial: Trial, name: str, parent: str, proposal: Proposal) -> Row:
        self._check_manifest()
        with self._tree(parent) as before:
            if tree_hash(before) == tree_hash(self.tools.engine):
                raise ToolError(prompts.SAME_TREE.format(parent))
            trial.events.event("proposal", lambda: proposal.model_dump() | {"parent": parent})
            engine = self.tools.engine
            row = trial.run(before, engine, (code_lines(before), code_lines(engine)))
            text = diff(before, engine)
        about = {"hypothesis": proposal.line, "predicted_ratio": proposal.predicted_ratio}
        return self._append(name, row | about | {"parent": parent}, text)

    def _check_manifest(self) -> None:
        try:
            run = json.loads((self.tools.engine / MANIFEST).read_text()).get("run")
        except (OSError, ValueError, AttributeError):
            raise ToolError(f"{MANIFEST}: is missing or no JSON object") from None
        if run != self.run_id:
            raise ToolError(f"{MANIFEST}: run is {run!r}; it must stay {self.run_id!r}")

    def _measure(self, phase: Phase) -> str:
        """Some blocks against the attempt's parent, in words; they decide nothing."""
        workload = self.settings.workloads[MAIN]
        with self._tree(self._parent(phase.name)) as before:
            try:
                with self.bench.pairs(before, self.tools.engine, MAIN, workload) as pair:
                    blocks = [pair() for _ in range(QUICK_BLOCKS)]
            except Broken as error:
                raise ToolError(f"the engine could not be measured ({error.status})") from error
        rates = [median(r for b in blocks for r in side[OBJECTIVE]) for side in _sides(blocks)]
        ratios = ", ".join(f"{2.718281828 ** b.gain(OBJECTIVE):.3f}" for b in blocks)
        return f"{OBJECTIVE}: {rates[1]:.1f} beside {rates[0]:.1f}; ratio by block: {ratios}"

    # the end

    def _finish(self, reason: str, last: Line) -> None:
        """Measure all keeps against the start, put the winner's tree in place, ask every gate."""
        rows = self.rows()
        best = search.best(rows)
        if best != BASELINE and FINAL not in {row["id"] for row in rows}:
            self.say("all keeps against the start")
            with self._tree(BASELINE) as start, self._tree(best) as tree:
                sizes = code_lines(start), code_lines(tree)
                row = final(self._trial(FINAL), start, tree, sizes)
                text = diff(start, tree)
            about = {"parent": BASELINE, "hypothesis": f"all keeps up to row {best} together"}
            rows = [*rows, self._append(FINAL, row | about, text)]
        won = rows[-1]["status"] == "keep" and rows[-1]["id"] == FINAL
        restored = self._end_of(best if won else BASELINE)
        rebuild(self.transcript.lines[: restored + 1], self.tools.engine)
        found = self.tools.verdict_of(list(self.tools.judge.gates))
        judgement = Judgement(gates=list(self.tools.judge.gates), submission=True, **found)
        text = f"Ended: {reason}.\n" + (prompts.outcome(rows[-1]) if won else "The start stays.")
        fields = {"restores": restored, "judgements": [judgement]}
        self.tell(FINAL, last.conversation + 1, text, **fields)

    def _ended(self, last: Line) -> bool:
        if not last.judgements[-1].passed:
            raise Stopped(f"the last tree failed {', '.join(last.judgements[-1].failed)}")
        return False

    # what the run's folder says

    def _trial(self, name: str) -> Trial:
        return Trial(
            settings=self.settings,
            bench=self.bench,
            gates=lambda folder, names: self.tools.verdict_of(names),
            full_gates=list(self.tools.judge.gates),
            events=Events(self.home / raw_file(name)),
            say=self.say,
        )

    def _append(self, name: str, row: Row, text: str | None = None) -> Row:
        """Write a row with its diff; the row comes last, so that what it names is there."""
        files = {"id": name, "raw": raw_file(name), "diff": None}
        if text is not None:
            files["diff"] = f"diffs/{stem(name)}.diff"
            write_atomic(self.home / files["diff"], text)
        ledger.append(self.home / LEDGER, row | files)
        self.say(f"row {name}: {row['status']}, {row['reason']}")
        return self.rows()[-1]

    def _number(self, phase: str) -> str:
        return phase.removeprefix(ATTEMPT)

    def _end_of(self, name: str) -> int:
        """Number of the line at which a row's tree stood complete."""
        phase = START if name == BASELINE else f"{ATTEMPT}{name}"
        return max(
            line.n
            for line in self.transcript.lines
            if line.phase == phase and line.author == "user"
        )

    def _parent(self, phase: str) -> str:
        """The row whose tree an attempt began with: the one that its first line restores."""
        first = next(line for line in self.transcript.lines if line.phase == phase)
        assert first.restores is not None
        source = self.transcript.lines[first.restores].phase
        return BASELINE if source == START else self._number(source)

    def _tree(self, name: str) -> AbstractContextManager[Path]:
        """A row's tree in a folder of its own."""
        return tree_of(self.transcript.lines[: self._end_of(name) + 1])

    def _judgement(self, trial: Trial) -> Judgement | None:
        """The last gates that a trial asked, if it came that far."""
        asked = [e["value"] for e in trial.events.known if e["kind"] == "gates"]
        if not asked:
            return None
        full = self.tools.judge.gates if len(asked) > 1 else self.settings.cheap_gates
        return Judgement(gates=list(full), submission=False, **asked[-1])

    def _profile(self, name: str) -> Profile | str:
        """The profile of the tree in place, which is a row's; made once, and kept beside it."""
        path = self.home / "raw" / f"profile-{stem(name)}.json"
        if path.is_file():
            return Profile.model_validate_json(path.read_text())
        try:
            profile = self.bench.profile(self.tools.engine)
        except RuntimeError as error:
            return f"no profile: {error}"
        write_atomic(path, profile.model_dump_json(indent=1) + "\n")
        return profile

    def _share(self, name: str) -> float | None:
        return share_of_floor(self.home, name)

    def _assumed(self, name: str) -> list[str]:
        for event in Events(self.home / raw_file(name), recorded=True).known:
            if event["kind"] == "proposal":
                return event["value"]["assumes"]
        return []


def read_rows(path: Path) -> list[Row]:
    """Rows of a ledger, nulls as None; none where there is no ledger yet."""
    if not path.is_file():
        return []
    rows = results.read_rows(path)  # checked as a whole whenever a row is added
    return rows.astype(object).where(rows.notna(), None).to_dict("records")


def stem(name: str) -> str:
    """A row's name in file names."""
    return name.zfill(4) if name.isdigit() else name


def raw_file(name: str) -> str:
    """A row's raw file, relative to the run's folder."""
    return f"raw/{stem(name)}.jsonl"


def changed_files(path: Path) -> set[str]:
    """Files that a stored diff changes."""
    text = path.read_text() if path.is_file() else ""
    heads = [line[4:] for line in text.splitlines() if line.startswith(("--- a/", "+++ b/"))]
    return {head[2:].split("\t")[0] for head in heads}


def main_blocks(home: Path, name: str) -> list[Block]:
    """The blocks of the optimised workload that a row rests on."""
    events = Events(home / raw_file(name), recorded=True).known
    found = [event["value"] for event in events if event["kind"] == f"block of {MAIN}"]
    return [Block(**value) for value in found if "status" not in value]


def share_of_floor(home: Path, name: str) -> float | None:
    """Decode rate of a row's tree over the roofline, both as measured when the row was made."""
    events = Events(home / raw_file(BASELINE), recorded=True).known
    floor = next((event["value"] for event in events if event["kind"] == "floor"), None)
    rates = [r for block in main_blocks(home, name) for r in block.candidate[OBJECTIVE]]
    return median(rates) / floor if floor and rates else None


def _sides(blocks: list[Block]) -> Iterator[list[dict[str, Any]]]:
    yield from zip(*((b.parent, b.candidate) for b in blocks), strict=True)

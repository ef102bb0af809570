"""A recorded optimisation followed again: trees rebuilt, decisions recomputed, gates for real.

Nothing is timed anew: each decision must follow from the recorded blocks by the rule that stands
in the code today, each parent from the rows before it, each tree from the recorded edits.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metainfer_lab.agent.loop import rebuild
from metainfer_lab.agent.replay import MACHINE_BOUND, Divergence, Report
from metainfer_lab.agent.tools import Judge, real_judge
from metainfer_lab.agent.turns import diff
from metainfer_lab.agent.watch import say_plainly
from metainfer_lab.errors import InputError
from metainfer_lab.optimise import search
from metainfer_lab.optimise.loop import ATTEMPT, START, raw_file, share_of_floor
from metainfer_lab.optimise.search import BASELINE, FINAL, Row
from metainfer_lab.optimise.size import code_lines
from metainfer_lab.optimise.trial import Events, Missing, Trial, baseline, final
from metainfer_lab.paths import tree_hash

if TYPE_CHECKING:
    from metainfer_lab.optimise.run import Optimisation

COMPARED = ("status", "reason", "ratio", "ratio_lo", "ratio_hi", "lines", "gates", "workload")


def replay(
    run: Optimisation,
    chosen: Sequence[str] | None = None,
    *,
    on_event: Callable[[str], None] | None = None,
    judge: Judge | None = None,
) -> Report:
    """Follow a record and list what comes out another way.

    chosen: rows whose gates are asked for real; every keep when None. InputError for a row that
    the run does not have.
    """
    rows, say = run.rows, on_event or say_plainly
    known = [row["id"] for row in search.kept(rows)] if chosen is None else list(chosen)
    if unknown := set(known) - {row["id"] for row in rows}:
        raise InputError(f"rows: run {run.id} has no {min(unknown)!r}")
    report = Report(run=run.id, phases=known)
    with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
        follower = Follower(run, rows, Path(scratch).resolve(), report, say)
        follower.follow(known, judge or real_judge(run.spec))
    say(str(report))
    return report


@dataclass
class Follower:
    """One replay: the run, its rows, a scratch folder for trees, what was found."""

    run: Optimisation
    rows: list[Row]
    scratch: Path
    report: Report
    say: Callable[[str], None]

    def follow(self, chosen: Sequence[str], judge: Judge) -> None:
        """Every row in order."""
        if (broken := self.run.transcript.broken_link()) is not None:
            self._diverged("", "record", "a whole chain", f"broken at line {broken}")
        for place, row in enumerate(self.rows):
            tree = self._tree(row["id"])
            self._parent(place, row)
            self._decision(row, tree)
            if row["id"] in chosen:
                self._gates(row, tree, judge)
            self.report.turns += 1

    def _tree(self, name: str) -> Path:
        """A row's tree from the recorded edits; that of the final row is the last line's."""
        phases = {BASELINE: START, FINAL: FINAL}
        phase, lines = phases.get(name, f"{ATTEMPT}{name}"), self.run.transcript.lines
        ends = [line for line in lines if line.phase == phase and line.author == "user"]
        folder = self.scratch / name
        if not folder.exists():
            rebuild(lines[: ends[-1].n + 1], folder)
            if (found := tree_hash(folder)) != ends[-1].tree:
                self._diverged(name, "tree", ends[-1].tree[:12], found[:12])
        return folder

    def _parent(self, place: int, row: Row) -> None:
        if row["id"] in (BASELINE, FINAL):
            return
        before, settings = self.rows[:place], self.run.settings
        share = share_of_floor(self.run.folder, search.best(before))
        following = search.next_attempt(before, settings, share)
        if following.parent != row["parent"]:
            found = following.parent or following.stop or "none"
            self._diverged(row["id"], "record", f"parent {row['parent']}", f"parent {found}")

    def _decision(self, row: Row, tree: Path) -> None:
        """The row again, from its recorded events, and its diff from the trees."""
        try:
            found = self._again(row, tree)
        except Missing as error:
            self._diverged(row["id"], "record", "a whole raw file", str(error))
            return
        for name in COMPARED:
            if name in found and found[name] != row[name]:
                self._diverged(row["id"], "record", f"{name} {row[name]}", f"{name} {found[name]}")
        if row["diff"] and row["id"] != FINAL:
            text = (self.run.folder / row["diff"]).read_text()
            if text != diff(self._tree(row["parent"]), tree):
                self._diverged(row["id"], "record", "the stored diff", "another")

    def _again(self, row: Row, tree: Path) -> dict[str, Any]:
        events = Events(self.run.folder / raw_file(row["id"]), recorded=True)
        started = next(line for line in self.run.transcript.lines if line.judgements)
        trial = Trial(
            settings=self.run.settings,
            bench=None,  # type: ignore[arg-type]  # recorded events ask nobody
            gates=lambda folder, names: {},
            full_gates=started.judgements[-1].gates,
            events=events,
        )
        if row["id"] == BASELINE:
            events.event("floor", lambda: None)
            return baseline(trial, tree, code_lines(tree))
        before = self._tree(row["parent"])
        if row["id"] == FINAL:
            tree = self._tree(search.best(self.rows))
            return final(trial, before, tree, (code_lines(before), code_lines(tree)))
        events.event("proposal", lambda: None)
        return trial.run(before, tree, (code_lines(before), code_lines(tree)))

    def _gates(self, row: Row, tree: Path, judge: Judge) -> None:
        """The row's last gates for real; speed belongs to the machine."""
        name = self._last_verdict(row)
        if name is None:
            return
        recorded = json.loads((self.run.folder / "verdicts" / name).read_text())
        then = {gate["gate"]: gate["status"] for gate in recorded["gates"]}
        self.say(f"row {row['id']}: {', '.join(then)}")
        verdict = judge.verify(tree, list(then), lambda gate: self.say(f"    {gate}"))
        for gate in verdict.gates:
            self.report.gates.append({"gate": gate.gate, "status": gate.status})
            if gate.gate not in MACHINE_BOUND and gate.status != then[gate.gate]:
                was, now = f"{gate.gate} {then[gate.gate]}", f"{gate.gate} {gate.status}"
                self._diverged(row["id"], "verdict", was, now)

    def _last_verdict(self, row: Row) -> str | None:
        phases = {BASELINE: START, FINAL: FINAL}
        phase = phases.get(row["id"], f"{ATTEMPT}{row['id']}")
        lines = [line for line in self.run.transcript.lines if line.phase == phase]
        return next((j.file for line in reversed(lines) for j in line.judgements[-1:]), None)

    def _diverged(self, row: str, kind: Any, recorded: str, found: str) -> None:
        self.report.divergences.append(
            Divergence(turn=self.report.turns, phase=row, kind=kind, recorded=recorded, found=found)
        )
        self.say(f"divergence: {self.report.divergences[-1]}")

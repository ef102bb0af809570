"""One proposal from its tree to its ledger row.

Everything that could come out another way the next time (a start, a gate, a block of runs) is an
event in the attempt's raw file, written before anything follows from it. A trial that is done
again goes through the events that it finds there and asks only for what comes after: so a run that
was killed goes on in the middle of a measurement, and a recorded decision can be checked.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from metainfer_lab.agent.scrub import scrub
from metainfer_lab.optimise.bench import Bench, Broken
from metainfer_lab.optimise.records import GUARDED, MAIN, OBJECTIVE, Block, Settings, one_line
from metainfer_lab.optimise.sequential import Decision, Rule

Row = dict[str, Any]
Gates = Callable[[Path, list[str]], Row]
KEPT: dict[str, str] = {"faster": "faster", "simpler": "as fast, with fewer lines"}


class Missing(Exception):
    """A recorded trial asks for an event that its raw file does not hold."""


class Events:
    """The events of one attempt: JSON lines, each on the disk before it is used."""

    def __init__(self, path: Path, *, recorded: bool = False) -> None:
        self.path, self.recorded, self.place = path, recorded, 0
        self.known = list(_read(path, mend=not recorded))

    def event(self, kind: str, make: Callable[[], Any]) -> Any:
        """The next event of this kind: as it was, or made now, timed and written down."""
        if self.place < len(self.known):
            found = self.known[self.place]
            if found["kind"] != kind:
                raise Missing(f"{self.path.name}: {found['kind']} where {kind} should be")
        elif self.recorded:
            raise Missing(f"{self.path.name}: ends before {kind}")
        else:
            begun = time.monotonic()
            value = make()
            seconds = round(time.monotonic() - begun, 2)
            found = {"kind": kind, "seconds": seconds, "value": value}
            self._append(found)
        self.place += 1
        return found["value"]

    @property
    def seconds(self) -> float:
        """How long the events so far took."""
        return round(sum(found["seconds"] for found in self.known[: self.place]), 1)

    def _append(self, found: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write((json.dumps(found) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        self.known.append(found)


def _read(path: Path, *, mend: bool) -> Iterator[dict[str, Any]]:
    """Whole lines of a file; the rest of one that a kill cut short is dropped."""
    if not path.is_file():
        return
    whole, newline, rest = path.read_bytes().rpartition(b"\n")
    if rest and mend:
        os.truncate(path, len(whole) + len(newline))
    yield from map(json.loads, whole.splitlines())


@dataclass
class Trial:
    """What a trial works with.

    gates: runs some gates on a folder, stores the verdict and says {passed, failed, file};
    full_gates: what a keeper must pass; say: progress.
    """

    settings: Settings
    bench: Bench
    gates: Gates
    full_gates: list[str]
    events: Events
    measured: list[Block] = field(default_factory=list)
    say: Callable[[str], None] = field(default=lambda text: None)

    def run(self, parent: Path, candidate: Path, lines: tuple[int, int]) -> Row:
        """The measured part of a row: status, reason, ratios, gates, lines, seconds.

        lines: of code, of the parent and of the candidate.
        """
        row: Row = {"gates": "", "lines": lines[1], "workload": None}
        row |= self._judged(row, parent, candidate, lines[1] < lines[0])
        return row | {"seconds": self.events.seconds, "gates": row["gates"] or None}

    def _judged(self, row: Row, parent: Path, candidate: Path, fewer: bool) -> Row:
        if failed := self._smoke(candidate):
            return failed
        if failed := self._gates(row, candidate, self.settings.cheap_gates):
            return failed
        try:
            row |= self.compared(parent, candidate, fewer, self.settings.rule)
            if row["status"] != "keep":
                return row
            if lost := self._guards(parent, candidate):
                return row | {"status": "discard", "reason": lost}
        except Broken as error:
            return fate(error)
        return self._kept(row, candidate)

    def _smoke(self, candidate: Path) -> Row | None:
        def made() -> Row | None:
            try:
                self.bench.smoke(candidate)
            except Broken as error:
                return fate(error)
            return None

        return self.events.event("smoke", made)

    def _gates(self, row: Row, candidate: Path, names: list[str]) -> Row | None:
        """Ask gates; what a failure comes to. `row` is told which ones passed."""
        self.say(f"  gates {', '.join(names)}")
        found = self.events.event("gates", lambda: self.gates(candidate, names))
        if found["passed"]:
            row["gates"] = f"{', '.join(names)}: passed"
            return None
        row["gates"] = f"failed: {', '.join(found['failed']) or 'before any gate ran'}"
        return {"status": "gate_failed", "reason": row["gates"]}

    def compared(self, parent: Path, candidate: Path, fewer: bool, rule: Rule) -> Row:
        """The decision on the objective, and the interval that it rests on."""
        gains: list[float] = []
        decision: Decision | None = None
        for block in self.blocks(parent, candidate, MAIN):
            self.measured.append(block)
            gains.append(block.gain(OBJECTIVE))
            if decision := rule.decide(gains, fewer):
                break
        assert decision is not None
        found, interval = rule.interval(gains), ratios(rule, gains)
        reason = f"{KEPT.get(decision, decision)} after {found.n} blocks"
        status: Literal["keep", "discard"] = "keep" if decision in KEPT else "discard"
        self.say(f"  {decision}: {interval['ratio']:.3f} after {found.n} blocks")
        return interval | {"status": status, "reason": reason, "workload": objective(self.settings)}

    def _guards(self, parent: Path, candidate: Path) -> str | None:
        """Which workload or metric a change costs more than its guard, if any."""
        for name in self.settings.workloads:
            for metric in GUARDED.get(name, ("output_tok_s",)):
                if not self._held(parent, candidate, name, metric):
                    return f"guard: {metric} of {name} not held to {self.settings.guard:.0%}"
        return None

    def _held(self, parent: Path, candidate: Path, name: str, metric: str) -> bool:
        """Whether a guard is shown; the objective's own blocks count for their other metrics."""
        known = self.measured if name == MAIN else []
        gains = [block.gain(metric) for block in known]
        more = self.blocks(parent, candidate, name)
        while (held := self.settings.rule.within(gains, self.settings.guard)) is None:
            gains.append(next(more).gain(metric))
        more.close()
        self.say(f"  guard {name} {metric}: {'held' if held else 'not held'}")
        return held

    def blocks(self, parent: Path, candidate: Path, name: str) -> Generator[Block]:
        """Blocks of one workload: those that are known, then as many new ones as are asked for."""
        workload = self.settings.workloads[name]
        while self.events.place < len(self.events.known) or self.events.recorded:
            yield Block(**self._event(name, None))
        with self.bench.pairs(parent, candidate, name, workload) as pair:
            while True:
                yield Block(**self._event(name, pair))

    def _event(self, name: str, pair: Callable[[], Block] | None) -> Row:
        def made() -> Row:
            assert pair is not None
            try:
                return pair().model_dump(mode="json")
            except Broken as error:
                return fate(error)

        found = self.events.event(f"block of {name}", made)
        if "status" in found:
            raise Broken(found["status"], found["reason"])
        return found

    def _kept(self, row: Row, candidate: Path) -> Row:
        """A keeper's last questions: every gate, and whether it was copied."""
        if failed := self._gates(row, candidate, self.full_gates):
            return row | failed
        copied = self.events.event("copied", lambda: self.bench.copied(candidate))
        if copied:
            reason = f"blank sheet: {one_line(copied, 180)}"
            return row | {"status": "gate_failed", "reason": reason}
        return row


def objective(settings: Settings) -> str:
    """What is optimised, in words for a row."""
    asked = settings.workloads[MAIN]
    lengths = f"prompt {asked.prompt_len}, output {asked.output_len}"
    return f"{OBJECTIVE}, {lengths}, streams {asked.concurrency}"


def fate(error: Broken) -> Row:
    """What a row says of an engine that ended or hung; its last words are cut and scrubbed."""
    return {"status": error.status, "reason": one_line(scrub(str(error)), 200)}


def baseline(trial: Trial, start: Path, lines: int) -> Row:
    """The first row: the start measured against itself, which shows what the machine adds."""
    gains = []
    for block in trial.blocks(start, start, MAIN):
        gains.append(block.gain(OBJECTIVE))
        if len(gains) == trial.settings.rule.least:
            break
    row = ratios(trial.settings.rule, gains) | {"status": "keep", "lines": lines}
    row |= {"seconds": trial.events.seconds, "workload": objective(trial.settings)}
    return row | {"reason": "the start against itself"}


def final(trial: Trial, start: Path, best: Path, lines: tuple[int, int]) -> Row:
    """All keeps together against the start, in one go."""
    row = trial.compared(start, best, lines[1] < lines[0], trial.settings.final_rule)
    return row | {"lines": lines[1], "seconds": trial.events.seconds}


def ratios(rule: Rule, gains: list[float]) -> Row:
    """Median and interval of log-ratios as the ratios of a row."""
    found = rule.interval(gains)
    names = zip(("ratio", "ratio_lo", "ratio_hi"), (found.median, found.lo, found.hi), strict=True)
    return {name: round(math.exp(value), 5) for name, value in names}

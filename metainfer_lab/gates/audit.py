"""audit: the gates judged. Every mutant and fake must die, every right engine must pass."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from metainfer_lab.errors import InputError
from metainfer_lab.gates import GATES
from metainfer_lab.gates.mutants import Mutant, catalogue
from metainfer_lab.gates.verdict import Record
from metainfer_lab.gates.worker import Judged, Subject, Worker, right_engines
from metainfer_lab.paths import ENGINES, LOCAL, RESULTS, tree_hash, write_atomic

if TYPE_CHECKING:
    import pandas as pd

RECORD = RESULTS / "audit.json"
UNAUDITED = frozenset({"speed"})  # what it asks depends on the machine
WORKERS = 2


class Audit(Record):
    """The kill matrix. gates: kills by gate; only: mutants and fakes that one gate alone kills, by
    gate; flaws: deaths that prove nothing, and right engines that fail, with the reason; versions,
    trees: what was judged, and on what; whole: nothing was left out; resumed: engines of which an
    interrupted audit had found all, not counted in seconds."""

    mutants: list[Judged]
    fakes: list[Judged]
    survivors: list[str]
    flaws: dict[str, str]
    right_engines: dict[str, bool]
    gates: dict[str, int]
    only: dict[str, list[str]]
    versions: dict[str, int]
    trees: dict[str, str]
    whole: bool
    passed: bool
    resumed: int
    seconds: float
    created: str

    @classmethod
    def recorded(cls) -> Audit:
        """The last whole audit that was published."""
        if not RECORD.is_file():
            raise InputError(
                f"audit: {RECORD} is not there; `metainfer-lab audit --record` makes it"
            )
        return cls.model_validate_json(RECORD.read_text())

    def record(self) -> Path:
        """Publish it. InputError unless it is whole."""
        if not self.whole:
            raise InputError("audit: only a whole one is recorded; leave out families and names")
        write_atomic(RECORD, self.model_dump_json(indent=1) + "\n")
        return RECORD

    @property
    def earlier(self) -> list[str]:
        """Gates and engines that have changed since; of a part, those that were asked."""
        gates = _asked(None) if self.whole else [*self.versions]
        moved = [name for name in gates if self.versions.get(name) != GATES[name].version]
        return moved + [n for n, tree in self.trees.items() if tree != _tree(n)]

    def table(self) -> pd.DataFrame:
        """The matrix: name, kind and, for each gate, whether it kills; [wrong engines]."""
        import pandas as pd

        rows = []
        for kind, killed in (("mutants", self.mutants), ("fakes", self.fakes)):
            for one in killed:
                of = {"name": one.name, "kind": f"{kind} of {one.engine.partition('-')[0]}"}
                rows.append(of | {gate: gate in one.by for gate in self.gates})
        return pd.DataFrame(rows)

    def summary(self) -> list[str]:
        """In lines: how many are dead, what is wrong, which right engines pass."""
        dead = len(self.mutants) + len(self.fakes) - len(self.survivors)
        head = f"{dead} dead of {dead + len(self.survivors)}: "
        lines = [head + ("passed" if self.passed else "FAILED")]
        before = f", {self.resumed} engines known from before it" if self.resumed else ""
        lines += [f"{self.created}, {self.seconds:.0f} s{before}"]
        lines += [f"earlier version of {', '.join(self.earlier)}"] if self.earlier else []
        lines += [f"LIVES: {name}" for name in self.survivors]
        lines += [f"DOES NOT COUNT: {name}: {why}" for name, why in self.flaws.items()]
        right = self.right_engines.items()
        return lines + [f"right engine {n}: {'pass' if ok else 'FAIL'}" for n, ok in right]

    def __str__(self) -> str:
        gates = [
            f"{gate}: {kills} killed, {len(self.only[gate])} by it alone"
            for gate, kills in self.gates.items()
        ]
        return "\n".join(self.summary() + gates)


def audit(
    family: str | None = None,
    *,
    names: Sequence[str] | None = None,
    gates: Sequence[str] | None = None,
    on_kill: Callable[[Judged], None] | None = None,
    fresh: bool = False,
) -> Audit:
    """Every gate on every wrong engine and on the right ones, two engines at a time.

    family: mutants and fakes of one family (a file name of data/mutants) instead of all; names: of
    mutants and fakes, without right engines; fresh: nothing that an interrupted audit found is
    taken over. Parts of the matrix fail for survivors and flaws
    alone; the whole also if a gate kills nothing, or nothing that others do not kill.
    """
    started = time.monotonic()
    asked = _asked(gates)
    mutants, fakes = _chosen(catalogue("mutants", family), catalogue("fakes", family), names)
    right = right_engines(family) if names is None else []
    tasks = [*right, *mutants, *fakes]
    rows = {} if fresh or asked != _asked(None) else _kept(tasks)
    resumed = len(rows)
    rows |= _judged([one for one in tasks if one.name not in rows], asked, on_kill)
    every = [rows[one.name] for one in (*mutants, *fakes)]
    passes = {one.name: not rows[one.name].by for one in right}
    only = {gate: [row.name for row in every if [*row.by] == [gate]] for gate in asked}
    kills = {gate: sum(gate in row.by for row in every) for gate in asked}
    survivors = [row.name for row in every if not row.by]
    flaws = {row.name: row.flaw for row in every if row.by and row.flaw}
    flaws |= {one.name: rows[one.name].words for one in right if rows[one.name].by}
    whole = family is None and names is None and len(asked) == len(GATES) - len(UNAUDITED)
    sound = not survivors and not flaws
    engines = {mutant.engine for mutant in (*mutants, *fakes)} | {one.engine for one in right}
    return Audit(
        mutants=[rows[mutant.name] for mutant in mutants],
        fakes=[rows[fake.name] for fake in fakes],
        survivors=survivors,
        flaws=flaws,
        right_engines=passes,
        gates=kills,
        only=only,
        versions={gate: GATES[gate].version for gate in asked},
        trees={name: _tree(name) for name in sorted(engines)},
        whole=whole,
        passed=sound and (not whole or all(only.values())),
        resumed=resumed,
        seconds=round(time.monotonic() - started, 1),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _asked(gates: Sequence[str] | None) -> list[str]:
    unknown = sorted(set(gates or ()) - GATES.keys())
    if unknown:
        raise InputError(f"gates: {', '.join(unknown)} unknown; known are {', '.join(GATES)}")
    asked = [name for name in gates or GATES if name not in UNAUDITED]
    if not asked:
        raise InputError("gates: none left to audit; speed is not audited")
    return asked


def _chosen(
    mutants: list[Mutant], fakes: list[Mutant], names: Sequence[str] | None
) -> tuple[list[Mutant], list[Mutant]]:
    if names is None:
        return mutants, fakes
    unknown = sorted(set(names) - {one.name for one in (*mutants, *fakes)})
    if unknown:
        raise InputError(f"names: {', '.join(unknown)} is no mutant or fake of data/")
    wanted = [[one for one in some if one.name in names] for some in (mutants, fakes)]
    return wanted[0], wanted[1]


def _judged(
    tasks: Sequence[Subject], gates: Sequence[str], on_kill: Callable[[Judged], None] | None
) -> dict[str, Judged]:
    """New rows by name; those that count are kept, for an audit after an interrupted one."""
    rows: dict[str, Judged] = {}
    for row in _work(tasks, gates):
        rows[row.name] = row
        if [*gates] == _asked(None) and row.as_meant:
            write_atomic(_place(row.name), row.model_dump_json(indent=1))
        if on_kill is not None:
            on_kill(row)
    return rows


def _kept(tasks: Sequence[Subject]) -> dict[str, Judged]:
    """Rows by name that an earlier audit found of the same trees, specs and gate versions."""
    now = {gate: GATES[gate].version for gate in _asked(None)}
    rows: dict[str, Judged] = {}
    for one in tasks:
        if (path := _place(one.name)).is_file():
            row = Judged.model_validate_json(path.read_text())
            with tempfile.TemporaryDirectory() as work:
                tree = tree_hash(one.apply(Path(work) / one.name))
            if (row.tree, row.spec, row.asked) == (tree, one.spec, now):
                rows[one.name] = row
    return rows


def _place(name: str) -> Path:
    return LOCAL / "audit" / f"{name}.json"


def _work(tasks: Sequence[Subject], gates: Sequence[str]) -> Iterator[Judged]:
    """What became of each engine, as it becomes known. Leaving the loop ends the workers."""
    if not tasks:
        return
    context = multiprocessing.get_context("spawn")
    asked = [(one, [*gates]) for one in tasks]
    with context.Pool(min(WORKERS, len(tasks)), Worker.begin) as pool:
        yield from pool.imap_unordered(_do, asked)


def _do(task: tuple[Subject, list[str]]) -> Judged:
    return Worker.current().judge(*task)


def _tree(engine: str) -> str:
    return tree_hash(ENGINES / engine)

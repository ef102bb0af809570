"""audit: the gates judged. Every mutant and fake must die, every right engine must pass."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from metainfer_lab.errors import InputError
from metainfer_lab.gates import GATES
from metainfer_lab.gates.mutants import Mutant, catalogue
from metainfer_lab.gates.verdict import Record
from metainfer_lab.gates.worker import Killed, RightEngine, Worker, right_engines
from metainfer_lab.paths import ENGINES, RESULTS, tree_hash, write_atomic

if TYPE_CHECKING:
    import pandas as pd

RECORD = RESULTS / "audit.json"
UNAUDITED = frozenset({"speed"})  # what it asks depends on the machine
WORKERS = 2


class Audit(Record):
    """The kill matrix. gates: kills by gate; only: mutants and fakes that one gate alone kills, by
    gate; flaws: deaths that prove nothing, and why; versions, trees: what was judged, and on what;
    whole: nothing was left out."""

    mutants: list[Killed]
    fakes: list[Killed]
    survivors: list[str]
    flaws: dict[str, str]
    right_engines: dict[str, bool]
    gates: dict[str, int]
    only: dict[str, list[str]]
    versions: dict[str, int]
    trees: dict[str, str]
    whole: bool
    passed: bool
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
        """Gates and engines that have changed since."""
        gates = [name for name, gate in GATES.items() if name not in UNAUDITED]
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
        head = f"{dead} dead of {dead + len(self.survivors)} in {self.seconds:.0f} s: "
        lines = [head + ("passed" if self.passed else "FAILED")]
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
    on_kill: Callable[[Killed], None] | None = None,
) -> Audit:
    """Every gate on every wrong engine and on the right ones, two engines at a time.

    family: mutants and fakes of one family (a file name of data/mutants) instead of all; names: of
    mutants and fakes, without right engines. Parts of the matrix fail for survivors and flaws
    alone; the whole also if a gate kills nothing, or nothing that others do not kill.
    """
    started = time.monotonic()
    asked = _asked(gates)
    mutants, fakes = _chosen(catalogue("mutants", family), catalogue("fakes", family), names)
    right = right_engines(family) if names is None else []
    rows, passes = _judged([*mutants, *fakes], right, asked, on_kill)
    every = [*rows.values()]
    only = {gate: [row.name for row in every if [*row.by] == [gate]] for gate in asked}
    kills = {gate: sum(gate in row.by for row in every) for gate in asked}
    survivors = [row.name for row in every if not row.by]
    flaws = {row.name: row.flaw for row in every if row.by and row.flaw}
    whole = family is None and names is None and len(asked) == len(GATES) - len(UNAUDITED)
    sound = not survivors and not flaws and all(passes.values())
    engines = {mutant.engine for mutant in (*mutants, *fakes)} | {one.engine for one in right}
    return Audit(
        mutants=[rows[mutant.key] for mutant in mutants],
        fakes=[rows[fake.key] for fake in fakes],
        survivors=survivors,
        flaws=flaws,
        right_engines=passes,
        gates=kills,
        only=only,
        versions={gate: GATES[gate].version for gate in asked},
        trees={name: _tree(name) for name in sorted(engines)},
        whole=whole,
        passed=sound and (not whole or all(only.values())),
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
    wrong: Sequence[Mutant],
    right: Sequence[RightEngine],
    gates: Sequence[str],
    on_kill: Callable[[Killed], None] | None,
) -> tuple[dict[str, Killed], dict[str, bool]]:
    """Rows by key, and whether each right engine passed."""
    rows: dict[str, Killed] = {}
    passes: dict[str, bool] = {}
    for one, found in _work([*right, *wrong], gates):
        if isinstance(found, bool):
            passes[one.key] = found
            continue
        rows[one.key] = found
        if on_kill is not None:
            on_kill(found)
    return rows, passes


def _work(
    tasks: Sequence[Mutant | RightEngine], gates: Sequence[str]
) -> Iterator[tuple[Mutant | RightEngine, Killed | bool]]:
    """What became of each task, as it becomes known. Leaving the loop ends the workers."""
    context = multiprocessing.get_context("spawn")
    asked = [(one, [*gates]) for one in tasks]
    with context.Pool(min(WORKERS, len(tasks)), Worker.begin) as pool:
        yield from pool.imap_unordered(_do, asked)


def _do(task: tuple[Mutant | RightEngine, list[str]]) -> tuple[Mutant | RightEngine, Killed | bool]:
    one, gates = task
    worker = Worker.current()
    if isinstance(one, RightEngine):
        return one, worker.verify(one.folder, one.spec, gates).passed
    return one, worker.judge(one, gates)


def _tree(engine: str) -> str:
    return tree_hash(ENGINES / engine)

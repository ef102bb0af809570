"""A worker of the audit: it keeps an oracle and the witnesses' worlds from engine to engine."""

from __future__ import annotations

import ctypes
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.util import Finalize
from pathlib import Path
from typing import ClassVar, NamedTuple

from metainfer_lab.engine import EngineManifest
from metainfer_lab.gates import GATES, verify
from metainfer_lab.gates.mutants import Mutant, catalogue, families
from metainfer_lab.gates.verdict import Record
from metainfer_lab.gates.witness import Witness, World
from metainfer_lab.oracle import Oracle
from metainfer_lab.paths import ENGINES
from metainfer_lab.spec import Spec

PR_SET_PDEATHSIG = 1
TOUCHED = "files: gate files"  # how verify says that somebody edits them while it runs


class RightEngine(NamedTuple):
    """An engine of data/engines under one of its specs: judged like a wrong one, it must pass."""

    engine: str
    spec: str
    is_fake: bool = False
    description: str = "right"

    @property
    def name(self) -> str:
        return f"{self.engine} as {self.spec}"

    def apply(self, folder: Path) -> Path:
        """The engine itself, where it is."""
        return ENGINES / self.engine


Subject = Mutant | RightEngine


def right_engines(family: str | None) -> list[RightEngine]:
    """The engines that mutants are made of, under every spec that they or a mutant name."""
    specs = {e: set(EngineManifest.read(ENGINES / e).specs) for e in families().values()}
    for mutant in catalogue("mutants") + catalogue("fakes"):
        specs[mutant.engine].add(mutant.spec)
    chosen = [engine for name, engine in families().items() if family in (None, name)]
    return [RightEngine(engine, spec) for engine in chosen for spec in sorted(specs[engine])]


class Judged(Record):
    """What became of one engine: the reason of each gate that failed it; why its death does not
    count, where it does not. asked: versions by gate; tree: the engine as it was judged."""

    name: str
    engine: str
    spec: str
    description: str
    tree: str
    asked: dict[str, int]
    by: dict[str, str]
    witness: Witness | None = None
    flaw: str | None = None
    right: bool = False
    seconds: float

    @property
    def as_meant(self) -> bool:
        """A wrong engine is dead, for the reason meant; a right one is not."""
        return self.flaw is None and bool(self.by) != self.right

    @property
    def words(self) -> str:
        """The first reason, of the gate that comes first."""
        return next((f"{gate}: {reason}" for gate, reason in self.by.items()), "")

    def __str__(self) -> str:
        gates = ", ".join(self.by)
        if self.right:
            return f"{self.name}: " + (f"FAILS {gates}" if self.by else "passes")
        if not self.by:
            return f"{self.name}: LIVES"
        return f"{self.name}: killed by {gates}" + (f"; BUT {self.flaw}" if self.flaw else "")


class Worker:
    """A context manager: what is at hand to judge one engine after another."""

    _current: ClassVar[Worker]

    def __enter__(self) -> Worker:
        self.open = ExitStack()
        self.oracle = self.open.enter_context(Oracle())
        self.folder = Path(self.open.enter_context(tempfile.TemporaryDirectory())).resolve()
        self.worlds: dict[str, World] = {}
        return self

    def __exit__(self, *_: object) -> None:
        self.open.close()

    @classmethod
    def begin(cls) -> None:
        """The only one of a new process, which the pool alone ends, and what it started with it."""
        import torch

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        cls._current = cls().__enter__()
        Finalize(None, cls._current.__exit__, exitpriority=1)

    @classmethod
    def current(cls) -> Worker:
        return cls._current

    def judge(self, one: Subject, gates: Sequence[str]) -> Judged:
        """The gates asked about an engine, and the witness of a mutant."""
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="metainfer-mutant-") as work:
            folder = one.apply(Path(work).resolve() / one.name)
            verdict = verify(folder, spec=Spec.load(one.spec), gates=gates, oracle=self.oracle)
            is_mutant = isinstance(one, Mutant) and not one.is_fake
            witness = self.world(one.engine).witness(folder) if is_mutant else None
        by = {gate.gate: brief(gate.reason) for gate in verdict.gates if gate.status == "fail"}
        return Judged(
            name=one.name,
            engine=one.engine,
            spec=one.spec,
            description=one.description,
            tree=verdict.tree,
            asked={gate: GATES[gate].version for gate in gates},
            by=by,
            witness=witness,
            flaw=_flaw(one, by, witness),
            right=isinstance(one, RightEngine),
            seconds=round(time.monotonic() - started, 1),
        )

    def world(self, engine: str) -> World:
        """What the right engine does, to hold the wrong ones to."""
        if engine not in self.worlds:
            self.worlds[engine] = World.make(engine, self.folder / engine, self.oracle)
        return self.worlds[engine]


def brief(reason: str) -> str:
    """Without the folders of the machine that it was found on: a record is read elsewhere."""
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "…/", reason)


def _flaw(one: Subject, by: dict[str, str], witness: Witness | None) -> str | None:
    """Why this death proves nothing: no witness, or not for the reason meant."""
    if isinstance(one, RightEngine):
        return None
    if touched := [gate for gate, reason in by.items() if reason.startswith(TOUCHED)]:
        return f"{touched[0]} says {by[touched[0]]}"
    if not one.is_fake:
        return None if witness else "in float64 it does what the right engine does"
    for gate, words in one.dies.items():
        if gate in by and not re.search(words, by[gate]):
            return f"{gate} says {by[gate][:120]!r}, meant was {words!r}"
    meant = one.dies.keys() & by.keys()
    return None if meant else f"{', '.join(one.dies)} should have killed it"

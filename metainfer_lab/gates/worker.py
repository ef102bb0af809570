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
from metainfer_lab.gates import Verdict, verify
from metainfer_lab.gates.mutants import Mutant, catalogue, families
from metainfer_lab.gates.verdict import Record
from metainfer_lab.gates.witness import Witness, World
from metainfer_lab.oracle import Oracle
from metainfer_lab.paths import ENGINES
from metainfer_lab.spec import Spec

PR_SET_PDEATHSIG = 1


class RightEngine(NamedTuple):
    """An engine of data/engines under one of its specs."""

    engine: str
    spec: str

    @property
    def key(self) -> str:
        return self.engine if self.engine == self.spec else f"{self.engine} as {self.spec}"

    @property
    def folder(self) -> Path:
        return ENGINES / self.engine


def right_engines(family: str | None) -> list[RightEngine]:
    """The engines that mutants are made of, under every spec that they or a mutant name."""
    specs = {e: set(EngineManifest.read(ENGINES / e).specs) for e in families().values()}
    for mutant in catalogue("mutants") + catalogue("fakes"):
        specs[mutant.engine].add(mutant.spec)
    chosen = [engine for name, engine in families().items() if family in (None, name)]
    return [RightEngine(engine, spec) for engine in chosen for spec in sorted(specs[engine])]


class Killed(Record):
    """What became of one wrong engine: the reason of each gate that failed it; why its death does
    not count, where it does not."""

    name: str
    engine: str
    description: str
    by: dict[str, str]
    witness: Witness | None = None
    flaw: str | None = None
    seconds: float

    @property
    def words(self) -> str:
        """The first reason, of the gate that comes first."""
        return next((f"{gate}: {reason}" for gate, reason in self.by.items()), "")

    def __str__(self) -> str:
        if not self.by:
            return f"{self.name}: LIVES"
        gates = ", ".join(self.by)
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

    def verify(self, folder: Path, spec: str, gates: Sequence[str]) -> Verdict:
        """The verdict on one engine."""
        return verify(folder, spec=Spec.load(spec), gates=gates, oracle=self.oracle)

    def judge(self, mutant: Mutant, gates: Sequence[str]) -> Killed:
        """The gates asked about a wrong engine, and its witness."""
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="metainfer-mutant-") as work:
            folder = mutant.apply(Path(work).resolve() / mutant.name)
            verdict = self.verify(folder, mutant.spec, gates)
            witness = None if mutant.is_fake else self.world(mutant.engine).witness(folder)
        by = {gate.gate: gate.reason for gate in verdict.gates if gate.status == "fail"}
        return Killed(
            name=mutant.name,
            engine=mutant.engine,
            description=mutant.description,
            by=by,
            witness=witness,
            flaw=_flaw(mutant, by, witness),
            seconds=round(time.monotonic() - started, 1),
        )

    def world(self, engine: str) -> World:
        """What the right engine does, to hold the wrong ones to."""
        if engine not in self.worlds:
            self.worlds[engine] = World.make(engine, self.folder / engine, self.oracle)
        return self.worlds[engine]


def _flaw(mutant: Mutant, by: dict[str, str], witness: Witness | None) -> str | None:
    """Why this death proves nothing: no witness, or not for the reason meant."""
    if not mutant.is_fake:
        return None if witness else "in float64 it does what the right engine does"
    for gate, words in mutant.dies.items():
        if gate in by and not re.search(words, by[gate]):
            return f"{gate} says {by[gate][:120]!r}, meant was {words!r}"
    meant = mutant.dies.keys() & by.keys()
    return None if meant else f"{', '.join(mutant.dies)} should have killed it"

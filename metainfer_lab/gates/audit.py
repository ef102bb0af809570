"""audit: the gates judged. Every mutant and fake must die, every right engine must pass."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from metainfer_lab.errors import InputError
from metainfer_lab.gates import GATES, Verdict, verify
from metainfer_lab.gates.mutants import Mutant
from metainfer_lab.spec import Spec

UNAUDITED = frozenset({"speed"})  # what it asks depends on the machine


class Killed(BaseModel):
    """What became of one wrong engine: its reason by gate, for each gate that failed it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    description: str
    by: dict[str, str]


class Audit(BaseModel):
    """The kill matrix. gates: kills by gate; only: mutants that one gate alone kills, by gate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mutants: list[Killed]
    fakes: list[Killed]
    survivors: list[str]
    right_engines: dict[str, bool]
    gates: dict[str, int]
    only: dict[str, list[str]]

    @property
    def passed(self) -> bool:
        """No survivor, no right engine refused, no gate that kills nothing."""
        return not self.survivors and all(self.right_engines.values()) and all(self.gates.values())

    def __str__(self) -> str:
        lines = [
            f"{gate}: {kills} killed, {len(self.only[gate])} by it alone"
            for gate, kills in self.gates.items()
        ]
        lines += [
            f"right engine {n}: {'pass' if ok else 'FAIL'}" for n, ok in self.right_engines.items()
        ]
        dead = len(self.mutants) + len(self.fakes) - len(self.survivors)
        return "\n".join([f"{dead} dead, survivors: {self.survivors or 'none'}", *lines])


def audit(
    mutants: Sequence[Mutant],
    fakes: Sequence[Mutant],
    right: Mapping[str, tuple[Path, Spec]],
    *,
    gates: Sequence[str] | None = None,
    on_kill: Callable[[Killed], None] | None = None,
) -> Audit:
    """Run every gate on every wrong engine, and on the right ones (name -> folder, spec).

    Takes about half a minute an engine on two free cores.
    """
    asked = [name for name in gates or GATES if name not in UNAUDITED]
    if not asked:
        raise InputError("audit: no gate left to audit; speed is not audited")
    rows = {kind: [] for kind in ("mutants", "fakes")}
    for kind, wrong in (("mutants", mutants), ("fakes", fakes)):
        for mutant in wrong:
            rows[kind].append(_killed(mutant, asked))
            if on_kill is not None:
                on_kill(rows[kind][-1])
    every = [*rows["mutants"], *rows["fakes"]]
    return Audit(
        **rows,
        survivors=[row.name for row in every if not row.by],
        right_engines={n: verify(f, spec=s, gates=asked).passed for n, (f, s) in right.items()},
        gates={gate: sum(gate in row.by for row in every) for gate in asked},
        only={gate: [row.name for row in every if [*row.by] == [gate]] for gate in asked},
    )


def _killed(mutant: Mutant, gates: Sequence[str]) -> Killed:
    with tempfile.TemporaryDirectory(prefix="metainfer-mutant-") as work:
        folder = mutant.apply(Path(work).resolve() / mutant.name)
        verdict = verify(folder, spec=_spec(mutant), gates=gates)
    return Killed(name=mutant.name, description=mutant.description, by=_reasons(verdict))


def _spec(mutant: Mutant) -> Spec:
    return Spec.load(mutant.spec or "qwen3-tiny-cpu")


def _reasons(verdict: Verdict) -> dict[str, str]:
    return {gate.gate: gate.reason for gate in verdict.gates if gate.status == "fail"}

"""The tools of an author of changes: those of a generation, with `propose` in place of phases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel

from metainfer_lab.agent.editor import ToolError
from metainfer_lab.agent.phases import Phase
from metainfer_lab.agent.tools import EDITOR, INPUTS, PROPOSE, REMOVE, SUBMIT, Result, Tools
from metainfer_lab.agent.transcript import Block
from metainfer_lab.optimise.prompts import fence
from metainfer_lab.optimise.records import Proposal, Record
from metainfer_lab.skills import Role

READ = "read_attempt"
OURS = (EDITOR, REMOVE, "read_skill")  # calls whose results are no program's words


class ReadAttempt(Record):
    """Show the whole diff of an earlier attempt, kept or not, by its row's id."""

    row: str


class Measure(Record):
    """Four quick blocks against the tree that this attempt began with. Decides nothing."""


SHARED = {name: model for name, model in INPUTS["implementer"].items() if name != SUBMIT}
OWN = {READ: ReadAttempt, "measure": Measure, PROPOSE: Proposal}


@dataclass
class OptimiserTools(Tools):
    """judged: what a proposal comes to; quick: a few blocks in words; diffs: folder of diffs."""

    inputs: ClassVar = {"implementer": SHARED | OWN}

    diffs: Path = Path()
    judged: Callable[[Proposal, Phase], Result] = field(default=lambda proposal, phase: Result(""))
    quick: Callable[[Phase], str] = field(default=lambda phase: "")

    def call(self, block: Block, phase: Phase, role: Role = "implementer") -> Result:
        """Carry out a call; what programs printed comes back fenced."""
        result = super().call(block, phase, role)
        if block["name"] not in OURS:
            result.text = fence(result.text)
        return result

    def verdict_of(self, gates: list[str]) -> dict[str, Any]:
        """Run gates on the folder as it stands: {passed, failed, file}."""
        judgement = self._judged(gates, submission=False).judgement
        assert judgement is not None
        return judgement.model_dump(include={"passed", "failed", "file"})

    def _do(self, asked: BaseModel, phase: Phase) -> Result:
        match asked:
            case ReadAttempt(row=row):
                return Result(self._diff(row))
            case Measure():
                return Result(self.quick(phase))
            case Proposal():
                return self.judged(asked, phase)
        return super()._do(asked, phase)

    def _diff(self, row: str) -> str:
        known = {path.stem.lstrip("0"): path for path in sorted(self.diffs.glob("*.diff"))}
        if row not in known:
            raise ToolError(f"no row {row!r} with a diff; there are {', '.join(known) or 'none'}")
        return known[row].read_text()

"""The tools of an author of changes: those of a generation, with `propose` in place of phases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metainfer_lab.agent.editor import ToolError
from metainfer_lab.agent.phases import Phase
from metainfer_lab.agent.tools import (
    EDITOR,
    INPUTS,
    PROPOSE,
    REMOVE,
    SUBMIT,
    Result,
    Tools,
    definitions,
)
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


OWN: dict[str, type[Record]] = {READ: ReadAttempt, "measure": Measure, PROPOSE: Proposal}


def inputs() -> dict[str, type]:
    """Every tool with a model of its input, beside the editor and bash."""
    shared = {name: model for name, model in INPUTS["implementer"].items() if name != SUBMIT}
    return shared | OWN


def offered() -> list[dict[str, Any]]:
    """The tools as the Messages API takes them."""
    shared = [tool for tool in definitions() if tool["name"] not in (SUBMIT, *OWN)]
    own = [
        {
            "name": name,
            "description": " ".join((model.__doc__ or "").split()),
            "input_schema": {
                key: value
                for key, value in model.model_json_schema().items()
                if key in ("type", "properties", "required")
            },
        }
        for name, model in OWN.items()
    ]
    return shared + own


@dataclass
class OptimiserTools(Tools):
    """judged: what a proposal comes to; quick: a few blocks in words; diffs: folder of diffs."""

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

    def _dispatch(self, name: str, given: Any, phase: Phase, role: Role) -> Result:
        if name == SUBMIT:
            raise ToolError(f"no tool {name!r}; an attempt ends by {PROPOSE}")
        if name not in OWN:
            return super()._dispatch(name, given, phase, role)
        match OWN[name].model_validate(given):
            case ReadAttempt(row=row):
                return Result(self._diff(row))
            case Proposal() as proposal:
                return self.judged(proposal, phase)
        return Result(self.quick(phase))

    def _diff(self, row: str) -> str:
        known = {path.stem.lstrip("0"): path for path in sorted(self.diffs.glob("*.diff"))}
        if row not in known:
            raise ToolError(f"no row {row!r} with a diff; there are {', '.join(known) or 'none'}")
        return known[row].read_text()

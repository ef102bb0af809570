"""The order in which an engine is written: a chain of phases that follows from the spec."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, get_args

from metainfer_lab.skills import Role, Skill, route, traits
from metainfer_lab.spec import Spec

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Phase:
    """One step of a generation, ended by a verdict and by nothing else.

    skills: names shown to the implementer; gates: what is new here; regression_gates: those of
    earlier phases, which must still pass.
    """

    name: str
    goal: str
    skills: tuple[str, ...]
    gates: tuple[str, ...]
    regression_gates: tuple[str, ...]

    @property
    def all_gates(self) -> tuple[str, ...]:
        """What a submission is judged by: earlier gates first."""
        return self.regression_gates + self.gates


class _Template(NamedTuple):
    name: str
    goal: str
    gates: tuple[str, ...]
    when: Callable[[Spec, dict[str, str]], bool] = lambda spec, known: True


def _recurrent(spec: Spec, known: dict[str, str]) -> bool:
    return known["family"] == "qwen3_5_moe"


TEMPLATES = (
    _Template(
        "operators",
        "load(), and each operator alone: its naive form and, on a GPU, its kernel",
        ("operators",),
        lambda spec, known: known["device"] == "gpu" or _recurrent(spec, known),
    ),
    _Template(
        "model",
        "engine.json, the strict loader, and score(): the right logits for any size of the family",
        ("weights", "logits"),
    ),
    _Template(
        "decode",
        "submit and step for one request at a time: KV cache, greedy and seeded decoding",
        ("alone", "decode"),
    ),
    _Template("state", "recurrent state over many steps", ("drift",), _recurrent),
    _Template(
        "batching",
        "many requests at once: continuous batching, chunked prefill, cancel, independence",
        ("batching",),
    ),
    _Template(
        "limits",
        "edges, bad arguments (a ValueError that names the argument), sampling",
        ("limits", "sampling"),
    ),
    _Template(
        "memory",
        "long answers and many requests: no drift, no allocation in steady decode, no leak",
        ("drift", "memory"),
    ),
    _Template(
        "parallel",
        "several devices, one model",
        ("parallel",),
        lambda spec, known: spec.parallel.tp > 1,
    ),
    _Template(
        "speed",
        "the spec's goals, with every earlier gate still passed",
        ("speed",),
        lambda spec, known: bool(spec.goals.model_dump(exclude_defaults=True)),
    ),
)


ADOPTED = "adopted"


def adopted_phase(gates: Collection[str]) -> Phase:
    """The one phase of an engine that was written elsewhere: every gate at once."""
    return Phase(ADOPTED, "an engine that was written elsewhere", (), tuple(gates), ())


def phases(
    spec: Spec, gates: Collection[str] | None = None, skills: dict[str, Skill] | None = None
) -> list[Phase]:
    """The phases of a spec, each with the skills it shows and the gates that end it.

    gates: names of the gates that exist (those of `metainfer_lab.gates` when not given); skills:
    those of data/skills when not given.
    """
    if gates is None:
        from metainfer_lab.gates import GATES as gates
    known, chain, passed = traits(spec), [], ()
    for template in TEMPLATES:
        own = tuple(gate for gate in template.gates if gate in gates and gate not in passed)
        if own and template.when(spec, known):
            shown = tuple(skill.name for skill in route(spec, template.name, skills=skills))
            chain.append(Phase(template.name, template.goal, shown, own, passed))
            passed += own
    return chain


def explain(
    spec: Spec, gates: Collection[str] | None = None, skills: dict[str, Skill] | None = None
) -> pd.DataFrame:
    """Which skills go to which phase and role, with their tokens, and what ends the phase."""
    import pandas as pd

    rows = []
    for phase in phases(spec, gates, skills):
        for role in get_args(Role):
            shown = route(spec, phase.name, role, skills=skills)
            names = ", ".join(skill.name for skill in shown)
            tokens = sum(skill.tokens for skill in shown)
            rows.append([phase.name, role, names, tokens, ", ".join(phase.gates)])
    return pd.DataFrame(rows, columns=["phase", "role", "skills", "tokens", "gates"])


def changed(spec: Spec, skills: dict[str, Skill]) -> pd.DataFrame:
    """What other skills than those of data/skills would change: one row a phase and role that
    would read something else, with the names of skills that come, go, or say something new."""
    import pandas as pd

    rows = []
    for phase in phases(spec):
        for role in get_args(Role):
            before = {skill.name: skill for skill in route(spec, phase.name, role)}
            after = {skill.name: skill for skill in route(spec, phase.name, role, skills=skills)}
            edited = sorted(n for n in before.keys() & after if before[n].body != after[n].body)
            names = [sorted(after.keys() - before), sorted(before.keys() - after), edited]
            more = sum(s.tokens for s in after.values()) - sum(s.tokens for s in before.values())
            if any(names):
                rows.append([phase.name, role, *map(", ".join, names), more])
    return pd.DataFrame(
        rows, columns=["phase", "role", "added", "dropped", "edited", "more_tokens"]
    )

"""Skills: what the agent is told, routed by spec, phase and role.

A skill is a folder with a SKILL.md: front matter that says when it applies, and a body that says
what must hold (shapes, formulas, invariants, traps), never how somebody's code does it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from metainfer_lab.errors import InputError
from metainfer_lab.paths import MODELS, SKILLS
from metainfer_lab.spec import Spec, explain

LAYERS = ("0-general", "1-family", "2-model", "3-deployment", "failures")
Role = Literal["implementer", "reviewer"]
FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n(.*)\Z", re.DOTALL)
CHARACTERS_PER_TOKEN = 4


class Skill(BaseModel):
    """One SKILL.md: its front matter and its body.

    applies_to maps a trait of the spec (`traits`) to the values that it may have; phase lists phase
    names or `all`; requires names skills that must be shown with this one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=64)
    description: str = Field(min_length=20, max_length=1024)
    layer: Literal["0-general", "1-family", "2-model", "3-deployment", "failures"]
    applies_to: dict[str, list[str]] = {}
    phase: list[str] = Field(min_length=1)
    gates: list[str] = Field(min_length=1)
    requires: list[str] = []
    sources: list[str] = Field(min_length=1)
    body: str = Field(min_length=1)

    @property
    def tokens(self) -> int:
        """Rough number of tokens of the body (four characters each)."""
        return len(self.body) // CHARACTERS_PER_TOKEN

    def applies(self, spec_traits: dict[str, str]) -> bool:
        """Whether each trait that the skill names has one of the values it allows."""
        return all(spec_traits[trait] in values for trait, values in self.applies_to.items())

    def in_phase(self, phase: str) -> bool:
        """Whether the skill belongs to a phase."""
        return phase in self.phase or "all" in self.phase

    def __str__(self) -> str:
        return f"# {self.name}\n{self.description}\n\n{self.body}"


def traits(spec: Spec) -> dict[str, str]:
    """What of a spec decides which skills and phases it has, as words."""
    from metainfer_lab.model import ModelDims

    return {
        "family": ModelDims.load(spec.model).family,
        "model": spec.model,
        "device": "cpu" if spec.hardware == "cpu" else "gpu",
        "hardware": spec.hardware,
        "weights": spec.precision.weights,
        "tp": str(spec.parallel.tp),
        "prefix_cache": str(spec.capabilities.prefix_cache).lower(),
        "speculative": spec.capabilities.speculative,
    }


def config_of(spec: Spec) -> Path:
    """The config.json of a spec's model: of one that ships, else of its checkpoint's folder."""
    shipped = MODELS / spec.model / "config.json"
    return shipped if shipped.is_file() else Path(spec.checkpoint.source) / "config.json"


def parse(path: Path) -> Skill:
    """Read one SKILL.md; an InputError names the file and the field."""
    found = FRONT_MATTER.match(path.read_text())
    where = f"skill {path.parent.name}"
    if found is None:
        raise InputError(f"{where}: no front matter; start SKILL.md with --- lines")
    try:
        skill = Skill(**yaml.safe_load(found[1]), body=found[2].strip())
    except ValidationError as error:
        raise InputError(f"{where}: {explain(error)}") from None
    if (skill.name, skill.layer) != (path.parent.name, path.parent.parent.name):
        raise InputError(f"{where}: name and layer must equal the folders {path.parent}")
    return skill


@lru_cache(maxsize=4)
def load_skills(folder: Path = SKILLS) -> dict[str, Skill]:
    """Every skill by name, in the order of layers, then names; references resolve."""
    paths = [p for layer in LAYERS for p in sorted((folder / layer).glob("*/SKILL.md"))]
    skills = {skill.name: skill for skill in map(parse, paths)}
    for skill in skills.values():
        missing = set(skill.requires) - set(skills)
        if missing:
            raise InputError(f"skill {skill.name}: requires unknown {', '.join(sorted(missing))}")
    return skills


def route(
    spec: Spec,
    phase: str,
    role: Role = "implementer",
    *,
    failed: Iterable[str] = (),
    skills: dict[str, Skill] | None = None,
) -> list[Skill]:
    """The skills shown to a role in a phase, general ones first.

    Failure skills are kept back until a gate that they are about was in `failed`; a reviewer looks
    for exactly these, so it gets them from the start.
    """
    skills = load_skills() if skills is None else skills
    known, failed = traits(spec), set(failed)
    chosen = {
        skill.name
        for skill in skills.values()
        if skill.applies(known) and skill.in_phase(phase) and _shown(skill, role, failed)
    }
    return [skill for skill in skills.values() if skill.name in _with_required(chosen, skills)]


def reachable(spec: Spec, skills: dict[str, Skill] | None = None) -> list[Skill]:
    """Every skill that some phase of a spec can show, failures included."""
    known = traits(spec)
    return [s for s in (skills or load_skills()).values() if s.applies(known)]


def _shown(skill: Skill, role: Role, failed: set[str]) -> bool:
    return skill.layer != "failures" or role == "reviewer" or bool(failed & set(skill.gates))


def _with_required(names: set[str], skills: dict[str, Skill]) -> set[str]:
    wanted, seen = list(names), set(names)
    while wanted:
        for name in skills[wanted.pop()].requires:
            if name not in seen:
                seen.add(name)
                wanted.append(name)
    return seen


def as_markdown(skill: Skill) -> str:
    """A skill as the SKILL.md that any agent with skills support can load."""
    front: dict[str, Any] = skill.model_dump(exclude={"body"})
    return f"---\n{yaml.safe_dump(front, sort_keys=False, width=100)}---\n{skill.body}\n"

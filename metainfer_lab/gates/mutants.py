"""Mutants and fakes: engines known to be wrong, made from a right one by a small patch."""

from __future__ import annotations

import difflib
import shutil
import tempfile
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, model_validator

from metainfer_lab.errors import InputError
from metainfer_lab.paths import ENGINES, FAKES, MUTANTS


class Mutant(BaseModel):
    """Either a patch (file, old, new) or whole replaced files; `spec` under which it is judged.

    dies: gate -> regular expression that its reason must match, or a fake died by accident.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str
    name: str
    description: str
    spec: str
    dies: dict[str, str] = {}
    file: str | None = None
    old: str | None = None
    new: str | None = None
    files: dict[str, str] = {}

    @model_validator(mode="after")
    def _one_way(self) -> Mutant:
        patch = (self.file, self.old, self.new)
        if bool(self.files) == (None not in patch):
            raise ValueError("give file, old and new, or files")
        if self.is_fake and not self.dies:
            raise ValueError(f"{self.name}: a fake says which gate kills it, and with what words")
        return self

    @property
    def is_fake(self) -> bool:
        """A pretender, not a fault: whole files of its own."""
        return bool(self.files)

    def apply(self, folder: Path) -> Path:
        """Write the wrong engine to `folder`; InputError when the patch does not fit once."""
        source = ENGINES / self.engine
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        for name, text in self.files.items():
            (folder / name).write_text(text)
        if self.file is not None:
            path = folder / self.file
            text = path.read_text()
            if text.count(self.old) != 1:
                raise InputError(
                    f"mutant {self.name}: its old text is {text.count(self.old)} times in "
                    f"{self.engine}/{self.file}; it must be there once"
                )
            path.write_text(text.replace(self.old, self.new))
        return folder

    def diff(self) -> str:
        """What makes it wrong, as a unified diff from the right engine."""
        with tempfile.TemporaryDirectory() as work:
            wrong, right = self.apply(Path(work) / self.name), ENGINES / self.engine
            lines: list[str] = []
            for path in sorted(wrong.rglob("*.py")):
                name = path.relative_to(wrong)
                before, after = ((at / name).read_text().splitlines() for at in (right, wrong))
                lines += difflib.unified_diff(before, after, f"{name}", f"{name}", lineterm="")
        return "\n".join(lines)


def families() -> dict[str, str]:
    """Family -> the engine that its mutants and fakes are made of."""
    return {path.stem: _read(path)["engine"] for path in sorted(MUTANTS.glob("*.yaml"))}


def catalogue(kind: Literal["mutants", "fakes"], family: str | None = None) -> list[Mutant]:
    """All mutants or fakes of a family, or of all; InputError when there is no such family."""
    known = families()
    if family is not None and family not in known:
        raise InputError(f"family: {family!r} unknown; known are {', '.join(known)}")
    wanted = {engine for name, engine in known.items() if family in (None, name)}
    paths = sorted((MUTANTS if kind == "mutants" else FAKES).glob("*.yaml"))
    return [mutant for path in paths for mutant in _load(path) if mutant.engine in wanted]


def _load(path: Path) -> list[Mutant]:
    shared = _read(path)
    own = {"engine": shared["engine"], "spec": shared["spec"]}
    return [Mutant(**own | entry) for entry in shared["mutants"]]


def _read(path: Path) -> dict:
    return yaml.safe_load(path.read_text())

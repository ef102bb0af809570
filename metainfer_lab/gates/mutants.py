"""Mutants and fakes: engines known to be wrong, made from a right one by a small patch."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, model_validator

from metainfer_lab.errors import InputError
from metainfer_lab.paths import ENGINES, FAKES, MUTANTS


class Mutant(BaseModel):
    """Either a patch (file, old, new) or whole replaced files; `spec` where it must be judged.

    dies: gate -> regular expression that its reason must match, or the engine died by accident.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str
    name: str
    description: str
    spec: str | None = None
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
        return self

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


def load_mutants(family: str) -> list[Mutant]:
    """The mutants of data/mutants/<family>.yaml."""
    return _load(MUTANTS / f"{family}.yaml")


def load_fakes(family: str) -> list[Mutant]:
    """The fakes of data/fakes/<family>.yaml."""
    return _load(FAKES / f"{family}.yaml")


def _load(path: Path) -> list[Mutant]:
    catalogue = yaml.safe_load(path.read_text())
    return [Mutant(engine=catalogue["engine"], **entry) for entry in catalogue["mutants"]]

"""`engine.json`: what an engine folder says of itself, and which folder serves a spec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from metainfer_lab.errors import InputError
from metainfer_lab.paths import ENGINES, tree_hash
from metainfer_lab.spec import Spec, explain

FILE = "engine.json"


class StoredPrecision(BaseModel):
    """Number formats of what an engine keeps and computes with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights: str
    activations: str
    kv_cache: str
    state: str | None = None


class EngineManifest(BaseModel):
    """interface: version of the calls; specs: ids served, the first one is the engine's own; run:
    the run that made it; targets: GPU architectures it compiles for; granules: of what each
    dimension of config.json must be a multiple; full_width: whether its kernels serve the widths of
    its own model alone; worlds: numbers of ranks it can be split into."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    interface: Literal[1]
    specs: list[str] = Field(min_length=1)
    run: str | None = None
    targets: list[str] = []
    granules: dict[str, int] = {}
    full_width: bool = False
    worlds: list[int] = [1]
    precision: StoredPrecision

    @classmethod
    def read(cls, folder: Path) -> EngineManifest:
        """The manifest of an engine folder; InputError names what is wrong in it."""
        path = folder / FILE
        if not path.is_file():
            raise InputError(f"engine: {folder} has no {FILE}; an engine folder says what it is")
        try:
            return cls.model_validate(json.loads(path.read_text()))
        except json.JSONDecodeError as error:
            raise InputError(f"engine: {path} is not JSON ({error})") from None
        except ValidationError as error:
            raise InputError(f"engine: {path}: {explain(error)}") from None


def find_engine(spec: Spec | str) -> Path:
    """The folder of the engine that serves a spec: the one named like it, else one that lists it.

    Raises InputError when there is none.
    """
    identity = spec if isinstance(spec, str) else spec.id
    named = ENGINES / identity
    if (named / FILE).is_file():
        return named
    for path in sorted(ENGINES.glob(f"*/{FILE}")):
        if identity in EngineManifest.read(path.parent).specs:
            return path.parent
    raise InputError(f"engine: none serves {identity} yet; generate one, or give its folder")


def is_recorded(folder: Path) -> bool:
    """Whether a folder is, byte for byte, an engine that the repository records.

    data/engines/trees.json names them. Such an engine is trusted like the repository itself.
    """
    path = ENGINES / "trees.json"
    recorded = json.loads(path.read_text()) if path.is_file() else {}
    return folder.parent == ENGINES and recorded.get(folder.name) == tree_hash(folder)

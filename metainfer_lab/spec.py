"""What the user asks for: a YAML file and the pydantic `Spec` it becomes. Schema only.

Whether a machine can do it is the plan's question; this module asks only whether the words and
numbers have a meaning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from metainfer_lab.errors import InputError
from metainfer_lab.paths import SPECS

WeightScheme = Literal["fp32", "bf16", "fp8", "int8", "nvfp4", "nvfp4-mix"]
StorageFormat = Literal["fp32", "bf16", "fp8", "int8", "nvfp4"]
ModuleClass = Literal[
    "embedding", "head", "attention", "gdn", "mlp", "routed_experts", "shared_expert", "small"
]
Count = Field(ge=1)


class Part(BaseModel):
    """A piece of a spec: unknown fields are mistakes, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Checkpoint(Part):
    """Where the weights come from."""

    source: str = Field(min_length=1, description="known name, folder, or hub id")


class Precision(Part):
    """Storage of weights, activations, cache and state; `modules` overrides one module class."""

    weights: WeightScheme
    modules: dict[ModuleClass, StorageFormat] = {}
    activations: Literal["fp32", "bf16", "int8_dynamic", "fp8_static", "nvfp4"]
    kv_cache: Literal["fp32", "bf16", "fp8"]
    state: Literal["fp32", "bf16"] = "fp32"


class Parallel(Part):
    """How many devices share one model; tensor parallelism is the one way."""

    tp: int = Count


class Capabilities(Part):
    """What the engine has to be able to do."""

    paged_kv: bool
    continuous_batching: bool
    prefix_cache: bool
    chunked_prefill: bool
    cuda_graphs: bool
    state_snapshots: bool = False
    speculative: Literal["none", "mtp", "ngram", "draft"]
    draft: str | None = None


class Workload(Part):
    """The traffic that the goals are meant for, in tokens and concurrent requests."""

    prompt_len: int = Count
    output_len: int = Count
    concurrency: int = Count
    max_context: int = Count


class Goals(Part):
    """What counts as fast enough; an absent goal is not asked.

    fraction_of_floor: share of the roofline rate; fraction_of_products: share of the rate of one
    token's matrix products alone, measured in the same run; ratio_to: least ratio of our rate
    to a baseline's.
    """

    ttft_ms: float | None = Field(default=None, gt=0)
    tpot_ms: float | None = Field(default=None, gt=0)
    tok_s: float | None = Field(default=None, gt=0)
    fraction_of_floor: float | None = Field(default=None, gt=0)
    fraction_of_products: float | None = Field(default=None, gt=0, le=1.2)
    ratio_to: dict[str, float] = {}


class Reported(Part):
    """A number that somebody published for this very case; never mixed with measured ones."""

    engine: str
    tok_s: float = Field(gt=0)
    conditions: str
    source: str


class Spec(Part):
    """One engine's contract: model, hardware, precision, parallelism, workload, goals."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    model: str = Field(min_length=1)
    checkpoint: Checkpoint
    hardware: str = Field(min_length=1)
    precision: Precision
    parallel: Parallel
    capabilities: Capabilities
    workload: Workload
    goals: Goals = Goals()
    reported: tuple[Reported, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _not_empty(cls, data: Any) -> Any:
        if not isinstance(data, dict | Spec):
            raise ValueError("a spec is a YAML mapping of fields; this is not one")
        return data

    @classmethod
    def load(cls, source: str | Path) -> Spec:
        """Read a shipped spec by its id, or any YAML file by its path."""
        path = _spec_path(source)
        try:
            data = yaml.safe_load(path.read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"{path.name}: not YAML ({reason}); correct that line") from None
        return cls.parse(data, name=path.name)

    @classmethod
    def parse(cls, data: Any, name: str = "spec") -> Spec:
        """Validate a mapping; an InputError names every wrong field in one line."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise InputError(f"{name}: {explain(error)}") from None

    def change(self, **values: Any) -> Spec:
        """A copy with leaf fields replaced; double underscores descend: parallel__tp=4."""
        data = self.model_dump(mode="json")
        for key, value in values.items():
            *parents, leaf = key.split("__")
            target = data
            for parent in parents:
                target = target[parent]
            target[leaf] = value
        return Spec.parse(data, name=self.id)

    def to_yaml(self) -> str:
        """The spec as the YAML that `load` reads back to an equal spec."""
        data = _filled(self.model_dump(mode="json", exclude_none=True))
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)

    def __str__(self) -> str:
        return self.to_yaml().rstrip()


def _filled(data: dict[str, Any]) -> dict[str, Any]:
    """The mapping without fields that are empty at any depth."""
    inner = {
        key: _filled(value) if isinstance(value, dict) else value for key, value in data.items()
    }
    return {key: value for key, value in inner.items() if value not in ({}, [])}


def shipped() -> list[str]:
    """Ids of the specs that come with the project, sorted."""
    return sorted(path.stem for path in SPECS.glob("*.yaml"))


def explain(error: ValidationError) -> str:
    """Pydantic's findings as `field: what is wrong and what would do`, joined by semicolons."""
    return "; ".join(_finding(item) for item in error.errors(include_url=False))


def _finding(item: Any) -> str:
    field = ".".join(str(part) for part in item["loc"]) or "(whole file)"
    kind, message = item["type"], item["msg"].removeprefix("Value error, ")
    if kind == "missing":
        return f"{field}: missing; add it"
    if kind == "extra_forbidden":
        return f"{field}: unknown field; remove it or correct its spelling"
    return f"{field}: {message[0].lower()}{message[1:]}, not {item['input']!r}"


def _spec_path(source: str | Path) -> Path:
    path = Path(source)
    if path.suffix in {".yaml", ".yml"}:
        if path.is_file():
            return path
        raise InputError(f"spec {source}: no such file; give a YAML file or a shipped spec's id")
    named = SPECS / f"{source}.yaml"
    if not named.is_file():
        raise InputError(f"spec {source}: not shipped; known are {', '.join(shipped())}")
    return named

"""A spec with everything loaded that its checks and floors need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pydantic import BaseModel, ConfigDict

from metainfer_lab.hardware import Hardware
from metainfer_lab.model import ModelDims, storage
from metainfer_lab.roofline import (
    Deployment,
    RateKind,
    decode_terms,
    floor_seconds,
    moved_bytes,
    prefill_terms,
)
from metainfer_lab.spec import Spec


class Finding(BaseModel):
    """A field, what is wrong (or worth knowing) about it, and what would do."""

    model_config = ConfigDict(frozen=True)

    field: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}; {self.remedy}"


@dataclass(frozen=True)
class Case:
    """Spec, model dimensions and machine side by side."""

    spec: Spec
    dims: ModelDims
    hardware: Hardware

    @classmethod
    def load(cls, spec: Spec) -> Case:
        """Load the model's dimensions and the machine's profile; InputError names what is amiss."""
        return cls(spec, ModelDims.load(spec.model), Hardware.load(spec.hardware))

    @cached_property
    def formats(self) -> dict[str, str]:
        """Module class -> storage format."""
        return storage(self.spec.precision.weights, self.spec.precision.modules)

    @cached_property
    def deployment(self) -> Deployment:
        return self.spread(self.spec.parallel.tp)

    def spread(self, tp: int) -> Deployment:
        """The same model on another number of devices."""
        precision = self.spec.precision
        return Deployment(
            dims=self.dims,
            formats=self.formats,
            activations=precision.activations,
            kv_cache=precision.kv_cache,
            state=precision.state,
            tp=tp,
        )

    @property
    def mean_context(self) -> int:
        """Cached tokens in the middle of a request's answer."""
        return self.spec.workload.prompt_len + self.spec.workload.output_len // 2

    def step_seconds(
        self, batch: int, context: int, kind: RateKind, experts_touched: float | None = None
    ) -> float:
        """Least seconds of a decode step."""
        terms = decode_terms(self.deployment, self.hardware, batch, context, experts_touched, kind)
        return floor_seconds(terms)

    def prompt_seconds(self, tokens: int, kind: RateKind) -> float:
        """Least seconds from a prompt to its first token."""
        return floor_seconds(prefill_terms(self.deployment, self.hardware, tokens, kind))

    def fits_cache(self) -> bool:
        """Whether a step's bytes fit a CPU's last-level cache, where DRAM floors do not bind."""
        if self.hardware.is_gpu:
            return False
        workload = self.spec.workload
        terms = decode_terms(
            self.deployment, self.hardware, workload.concurrency, self.mean_context
        )
        return moved_bytes(terms) < self.hardware.cache_bytes

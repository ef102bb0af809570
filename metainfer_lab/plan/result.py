"""`Plan`: what a spec comes to, in numbers, each with the terms that make it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from metainfer_lab.hardware import Hardware
from metainfer_lab.model import ModelDims
from metainfer_lab.plan.case import Case, Finding
from metainfer_lab.roofline import (
    RateKind,
    Term,
    decode_terms,
    floor_seconds,
    moved_bytes,
    prefill_terms,
    resident_bytes,
    resource_seconds,
    sequences_that_fit,
    weight_bytes_per_token,
)
from metainfer_lab.spec import Reported, Spec

if TYPE_CHECKING:
    import pandas as pd

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (0, 1024, 8192, 32768)
PROMPTS = (128, 256, 512, 1024, 2048, 8192)


class Share(BaseModel):
    """A reported rate beside the floor of the same case."""

    model_config = ConfigDict(frozen=True)

    engine: str
    tok_s: float
    floor_tok_s: float
    share_of_floor: float
    conditions: str
    source: str

    def __str__(self) -> str:
        return f"{self.engine}, {self.tok_s:g} tok/s, {self.share_of_floor:.1%} of the floor"


class Plan(BaseModel):
    """A resolved spec. Bytes are of all devices together unless the name says otherwise.

    tok_s_floor: batch -> context -> tokens/s of all streams at the planning rates;
    ttft_floor_ms: prompt length -> ms; both have a `_nominal` twin, which alone may refuse a row.
    """

    model_config = ConfigDict(frozen=True)

    spec: Spec
    hardware: Hardware
    dims: ModelDims = Field(exclude=True, repr=False)
    parameters: int
    formats: dict[str, str]
    weight_bytes_per_token: int
    bytes_per_token: int
    bytes_per_token_per_device: int
    weight_bytes_per_device: int
    kv_bytes_per_token: int
    state_bytes_per_sequence: int
    sequences_that_fit: int
    experts_touched: dict[int, float]
    tok_s_floor: dict[int, dict[int, float]]
    tok_s_floor_nominal: dict[int, dict[int, float]]
    ttft_floor_ms: dict[int, float]
    ttft_floor_nominal_ms: dict[int, float]
    step_terms: tuple[Term, ...]
    prompt_terms: tuple[Term, ...]
    reported: tuple[Share, ...]
    warnings: tuple[Finding, ...]

    @property
    def case(self) -> Case:
        """The same case again, for floors at other points."""
        return Case(self.spec, self.dims, self.hardware)

    def floor_tok_s(
        self,
        batch: int,
        context: int,
        experts_touched: float | None = None,
        kind: RateKind = "nominal",
    ) -> float:
        """Most tokens/s of `batch` streams with `context` cached tokens each.

        experts_touched: measured mean of distinct experts a layer and step; None: uniform routing.
        """
        return batch / self.case.step_seconds(batch, context, kind, experts_touched)

    def floor_ttft_ms(self, prompt_len: int, kind: RateKind = "nominal") -> float:
        """Least ms from a prompt of `prompt_len` tokens to its first token."""
        return self.case.prompt_seconds(prompt_len, kind) * 1e3

    def terms(
        self, batch: int = 1, context: int = 0, experts_touched: float | None = None
    ) -> pd.DataFrame:
        """The terms of one decode step on one device: formula, bytes or operations, us, source."""
        case = self.case
        return _table(decode_terms(case.deployment, case.hardware, batch, context, experts_touched))

    def terms_of_prompt(self, prompt_len: int) -> pd.DataFrame:
        """The terms of a first token on one device, like `terms`."""
        case = self.case
        return _table(prefill_terms(case.deployment, case.hardware, prompt_len))

    def floors(self) -> pd.DataFrame:
        """One row per batch and context: ms by resource, which of them binds, tokens/s."""
        import pandas as pd

        return pd.DataFrame(
            [
                self._floor(batch, context)
                for batch, by_context in self.tok_s_floor.items()
                for context in by_context
            ]
        )

    def _floor(self, batch: int, context: int) -> dict[str, float | int | str]:
        case = self.case
        terms = decode_terms(case.deployment, case.hardware, batch, context)
        by_resource = resource_seconds(terms)
        step = floor_seconds(terms)
        return {
            "batch": batch,
            "context": context,
            "experts_touched": case.deployment.touched(batch),
            "gb_per_device": moved_bytes(terms) / 1e9,
            **{f"{name}_ms": seconds * 1e3 for name, seconds in by_resource.items()},
            "bound_by": max(by_resource, key=lambda name: by_resource[name]),
            "tpot_ms": step * 1e3,
            "tok_s": batch / step,
            "tok_s_nominal": self.tok_s_floor_nominal[batch][context],
        }

    def __str__(self) -> str:
        work, machine = self.spec.workload, self.hardware
        first = self.ttft_floor_ms[work.prompt_len]
        return "\n".join(
            [
                f"plan {self.spec.id}: {self.parameters:,} parameters, "
                f"{self.spec.parallel.tp} x {machine.title}",
                f"  a token reads {self.weight_bytes_per_token / 1e9:.3f} GB of weights, "
                f"{self.bytes_per_token / 1e9:.3f} GB in all",
                f"  decode floor {self.tok_s_floor[1][0]:,.0f} tok/s (batch 1, context 0, "
                f"{machine.bandwidth.planning / 1e12:.3g} TB/s a device)",
                f"  first token floor {first:.1f} ms (prompt of {work.prompt_len:,} tokens)",
                f"  {self.sequences_that_fit:,} sequences of {work.max_context:,} tokens fit",
                *(f"  reported: {row}" for row in self.reported),
                *(f"  note: {warning}" for warning in self.warnings),
            ]
        )


def make_plan(case: Case, warnings: list[Finding]) -> Plan:
    """The numbers of a case that nothing refuses."""
    deployment, hardware, work = case.deployment, case.hardware, case.spec.workload
    whole = case.spread(1)
    weights = weight_bytes_per_token(deployment)
    step = decode_terms(deployment, hardware, work.concurrency, case.mean_context)
    return Plan(
        spec=case.spec,
        hardware=hardware,
        dims=case.dims,
        parameters=case.dims.parameter_count(),
        formats={role: case.formats[role] for role in whole.weight_bytes_by_class()},
        weight_bytes_per_token=round(weights),
        bytes_per_token=round(weights + 2 * whole.state_bytes()),
        bytes_per_token_per_device=round(moved_bytes(decode_terms(deployment, hardware, 1, 0))),
        weight_bytes_per_device=round(
            resident_bytes(deployment, case.spec.capabilities.speculative == "mtp")
        ),
        kv_bytes_per_token=whole.kv_bytes_per_token(),
        state_bytes_per_sequence=whole.state_bytes(),
        sequences_that_fit=sequences_that_fit(deployment, hardware, work.max_context),
        experts_touched={batch: whole.touched(batch) for batch in BATCHES if case.dims.moe},
        tok_s_floor=_rates(case, "planning"),
        tok_s_floor_nominal=_rates(case, "nominal"),
        ttft_floor_ms=_first_tokens(case, "planning"),
        ttft_floor_nominal_ms=_first_tokens(case, "nominal"),
        step_terms=tuple(step),
        prompt_terms=tuple(prefill_terms(deployment, hardware, work.prompt_len)),
        reported=tuple(_share(case, row) for row in case.spec.reported),
        warnings=tuple(warnings),
    )


def _rates(case: Case, kind: RateKind) -> dict[int, dict[int, float]]:
    longest, work = case.dims.max_position_embeddings, case.spec.workload
    contexts = sorted({n for n in CONTEXTS if n <= longest} | {case.mean_context})
    return {
        batch: {n: batch / case.step_seconds(batch, n, kind) for n in contexts}
        for batch in sorted({*BATCHES, work.concurrency})
    }


def _first_tokens(case: Case, kind: RateKind) -> dict[int, float]:
    longest = case.dims.max_position_embeddings
    prompts = sorted({n for n in PROMPTS if n <= longest} | {case.spec.workload.prompt_len})
    return {n: case.prompt_seconds(n, kind) * 1e3 for n in prompts}


def _share(case: Case, row: Reported) -> Share:
    floor = 1 / case.step_seconds(1, 0, "planning")
    return Share(**row.model_dump(), floor_tok_s=floor, share_of_floor=row.tok_s / floor)


def _table(terms: list[Term]) -> pd.DataFrame:
    import pandas as pd

    table = pd.DataFrame([term.model_dump() for term in terms])
    table["amount"] = table["amount"].round().astype("int64")
    table["seconds"] *= 1e6
    return table.rename(columns={"seconds": "us"})

"""The least time that a step can take: bytes, operations and messages over rates. Pure arithmetic.

A floor counts what no implementation of the deployment can avoid, once, and nothing else: each
weight read once a step, the cached keys and values of the context read once, the recurrent state
read and written once, the multiplications of the matrix products. Not counted: activations, the
lookup of a token's embedding row, the write of one token's keys and values, the convolution
state, attention scores (together below one per cent at the contexts used here).
The three resources overlap in the best case, so the floor is the largest of them, never the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pydantic import BaseModel, ConfigDict

from metainfer_lab.errors import InputError
from metainfer_lab.hardware import Hardware
from metainfer_lab.model.config import ModelDims
from metainfer_lab.model.layout import BITS, stored_bytes
from metainfer_lab.model.tensors import Tensor, inventory

Resource = Literal["memory", "arithmetic", "link"]
RateKind = Literal["planning", "nominal"]
NOT_RUN = {"embedding", "vision", "mtp"}


class Term(BaseModel):
    """One line of a floor, for one device: what is moved or computed, and how long that takes."""

    model_config = ConfigDict(frozen=True)

    name: str
    resource: Resource
    formula: str
    amount: float
    unit: Literal["bytes", "operations"]
    seconds: float
    source: str


@dataclass(frozen=True, eq=False)
class Deployment:
    """A model as it is stored and spread: formats by module class, cache, state, devices."""

    dims: ModelDims
    formats: Mapping[str, str]
    activations: str
    kv_cache: str
    state: str
    tp: int

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parameter tensors; those that a decode step runs are not in NOT_RUN."""
        return inventory(self.dims)

    def touched(self, tokens: int) -> float:
        """Expected distinct experts of a layer for `tokens` tokens under uniform routing.

        E (1 - (1 - k/E)^n): each token misses an expert with probability 1 - k/E.
        """
        if self.dims.moe is None:
            return 0.0
        experts, chosen = self.dims.moe.num_experts, self.dims.moe.num_experts_per_tok
        return experts * (1 - (1 - chosen / experts) ** tokens)

    def weight_bytes_by_class(self, tp: int = 1) -> dict[str, float]:
        """Bytes of the text model's weights by module class on one of `tp` devices, all experts."""
        total: dict[str, float] = {}
        for tensor in self.tensors:
            size = stored_bytes(tensor, self.formats[tensor.role]) * self.share(tensor, tp)
            total[tensor.role] = total.get(tensor.role, 0.0) + size
        return total

    def share(self, tensor: Tensor, tp: int) -> float:
        """Part of a tensor that one of `tp` devices holds: norms and routers whole, KV heads >= 1.

        Beyond as many devices as KV heads, each KV head lives on tp / KV heads of them.
        """
        if tensor.role == "small" and "linear_attn" not in tensor.name:
            return 1.0
        if "k_proj" in tensor.name or "v_proj" in tensor.name:
            return 1.0 / min(tp, self.dims.num_key_value_heads)
        return 1.0 / tp

    def kv_bytes_per_token(self, tp: int = 1) -> int:
        """Bytes of one token's keys and values in all attention layers, on one of `tp` devices."""
        heads = max(1, self.dims.num_key_value_heads // tp)
        layers = self.dims.attention_layers
        return int(2 * layers * heads * self.dims.head_dim * BITS[self.kv_cache] // 8)

    def state_bytes(self, tp: int = 1) -> int:
        """Bytes of one sequence's recurrent state: GDN layers x value heads x Dk x Dv."""
        gdn = self.dims.gdn
        if gdn is None:
            return 0
        weights = self.dims.gdn_layers * gdn.num_value_heads * gdn.key_head_dim * gdn.value_head_dim
        return int(weights * BITS[self.state] // 8 // tp)

    def conv_bytes(self, tp: int = 1) -> int:
        """Bytes of one sequence's convolution inputs (kernel - 1 columns), for memory alone."""
        gdn = self.dims.gdn
        if gdn is None:
            return 0
        columns = self.dims.gdn_layers * gdn.conv_dim * (gdn.conv_kernel - 1)
        return int(columns * BITS[_plain(self.activations)] // 8 // tp)

    def sequence_bytes(self, context: int, tp: int = 1) -> int:
        """Memory that one sequence of `context` tokens holds on one of `tp` devices."""
        return context * self.kv_bytes_per_token(tp) + self.state_bytes(tp) + self.conv_bytes(tp)

    def product_dtype(self, role: str) -> str:
        """The type in which a class's matrix products are computed."""
        quantised = {"fp8_static": "fp8", "int8_dynamic": "int8", "nvfp4": "nvfp4"}
        native = quantised.get(self.activations)
        return native if native == self.formats[role] else _plain(self.activations)


def _plain(activations: str) -> str:
    """The float type beside a quantised one: int8 runs on CPUs in fp32, the others in bf16."""
    return "fp32" if activations in {"fp32", "int8_dynamic"} else "bf16"


def _rate(hardware: Hardware, kind: RateKind, dtype: str | None = None) -> tuple[float, str]:
    rate = hardware.bandwidth if dtype is None else hardware.rate(dtype)
    value = rate.planning if kind == "planning" else rate.nominal
    unit = "B/s" if dtype is None else "op/s"
    return value, f"{value:.4g} {unit} ({kind} rate of {hardware.name})"


def decode_terms(
    deployment: Deployment,
    hardware: Hardware,
    batch: int,
    context: int,
    experts_touched: float | None = None,
    kind: RateKind = "planning",
) -> list[Term]:
    """Terms of one decode step of `batch` sequences that each hold `context` cached tokens.

    experts_touched: mean distinct experts a layer, measured; None takes the expectation under
    uniform routing (`Deployment.touched`).
    """
    touched = deployment.touched(batch) if experts_touched is None else experts_touched
    memory = _weight_terms(deployment, hardware, touched, kind)
    memory += _cache_terms(deployment, hardware, batch, context, kind)
    products = _product_terms(deployment, hardware, tokens=batch, heads=batch, kind=kind)
    return memory + products + link_terms(deployment, hardware, batch)


def prefill_terms(
    deployment: Deployment, hardware: Hardware, tokens: int, kind: RateKind = "planning"
) -> list[Term]:
    """Terms of a prompt of `tokens` tokens, nothing cached: matrix products and weights alone."""
    memory = _weight_terms(deployment, hardware, deployment.touched(tokens), kind)
    products = _product_terms(deployment, hardware, tokens=tokens, heads=1, kind=kind)
    return memory + products + link_terms(deployment, hardware, tokens)


def floor_seconds(terms: list[Term]) -> float:
    """The largest of memory, arithmetic and link time: they may overlap, so never the sum."""
    return max(resource_seconds(terms).values())


def resource_seconds(terms: list[Term]) -> dict[str, float]:
    """Seconds by resource."""
    totals = {"memory": 0.0, "arithmetic": 0.0, "link": 0.0}
    for term in terms:
        totals[term.resource] += term.seconds
    return totals


def moved_bytes(terms: list[Term]) -> float:
    """Bytes that the memory terms move on one device."""
    return sum(term.amount for term in terms if term.resource == "memory")


def sequences_that_fit(deployment: Deployment, hardware: Hardware, context: int) -> int:
    """How many sequences of `context` tokens fit beside the weights, nothing else held."""
    left = hardware.memory_bytes - resident_bytes(deployment)
    return max(0, int(left // deployment.sequence_bytes(context, deployment.tp)))


def resident_bytes(deployment: Deployment, mtp: bool = False) -> float:
    """Bytes of the text model's weights on one device; vision stays on disk, MTP if asked."""
    left_out = {"vision"} if mtp else {"vision", "mtp"}
    sizes = deployment.weight_bytes_by_class(deployment.tp)
    return sum(size for role, size in sizes.items() if role not in left_out)


def weight_bytes_per_token(deployment: Deployment) -> float:
    """Bytes of the weights that one token's step reads, all devices together, at batch 1."""
    sizes = deployment.weight_bytes_by_class()
    return sum(
        size * _touched_share(deployment, role, deployment.touched(1))
        for role, size in sizes.items()
        if role not in NOT_RUN
    )


def _touched_share(deployment: Deployment, role: str, touched: float) -> float:
    moe = deployment.dims.moe
    return touched / moe.num_experts if moe is not None and role == "routed_experts" else 1.0


def _weight_terms(
    deployment: Deployment, hardware: Hardware, touched: float, kind: RateKind
) -> list[Term]:
    rate, source = _rate(hardware, kind)
    terms = []
    for role, size in deployment.weight_bytes_by_class(deployment.tp).items():
        if role in NOT_RUN:
            continue
        amount = size * _touched_share(deployment, role, touched)
        experts = (
            f" x {touched:.1f} experts / {deployment.dims.moe.num_experts}"
            if (role == "routed_experts" and deployment.dims.moe)
            else ""
        )
        formula = f"{role} weights in {deployment.formats[role]}{experts}{_over(deployment.tp)}"
        terms.append(_memory(f"{role} weights", formula, amount, rate, source))
    return terms


def _cache_terms(
    deployment: Deployment, hardware: Hardware, batch: int, context: int, kind: RateKind
) -> list[Term]:
    rate, source = _rate(hardware, kind)
    tp, dims = deployment.tp, deployment.dims
    per_token, state = deployment.kv_bytes_per_token(tp), deployment.state_bytes(tp)
    kv = f"{batch} x {context} tokens x {per_token:,} B ({dims.attention_layers} layers, K and V)"
    terms = [_memory("keys and values", kv, batch * context * per_token, rate, source)]
    if state:
        formula = f"{batch} x 2 (read, written) x {state:,} B ({dims.gdn_layers} layers)"
        terms.append(_memory("recurrent state", formula, 2 * batch * state, rate, source))
    return terms


def _memory(name: str, formula: str, amount: float, rate: float, source: str) -> Term:
    return Term(
        name=name,
        resource="memory",
        formula=formula,
        amount=amount,
        unit="bytes",
        seconds=amount / rate,
        source=source,
    )


def _product_terms(
    deployment: Deployment, hardware: Hardware, tokens: int, heads: int, kind: RateKind
) -> list[Term]:
    """2 operations a weight and token; the head runs for `heads` tokens; by computing type."""
    weights: dict[str, float] = {}
    for tensor in deployment.tensors:
        if tensor.role in NOT_RUN or not tensor.is_matrix:
            continue
        rows = heads if tensor.role == "head" else tokens
        active = _touched_share(deployment, tensor.role, deployment.touched(1))
        dtype = deployment.product_dtype(tensor.role)
        weights[dtype] = weights.get(dtype, 0.0) + 2 * rows * tensor.size * active
    terms = []
    for dtype, operations in weights.items():
        rate, source = _rate(hardware, kind, dtype)
        amount = operations / deployment.tp
        formula = f"2 x active matrix weights x {tokens} tokens{_over(deployment.tp)}"
        terms.append(
            Term(
                name=f"{dtype} matrix products",
                resource="arithmetic",
                formula=formula,
                amount=amount,
                unit="operations",
                seconds=amount / rate,
                source=source,
            )
        )
    return terms


def link_terms(deployment: Deployment, hardware: Hardware, tokens: int) -> list[Term]:
    """Two all-reduces a layer of [tokens, hidden]: 2 (n-1)/n of the message crosses a link each.

    The bandwidth-optimal volume (reduce-scatter and all-gather) is a bound for every algorithm.
    """
    tp = deployment.tp
    if tp == 1:
        return []
    if hardware.link is None:
        raise InputError(f"parallel.tp: {hardware.name} has no link between devices; use 1")
    count = 2 * deployment.dims.num_hidden_layers
    width = BITS[_plain(deployment.activations)] // 8
    message = tokens * deployment.dims.hidden_size * width
    amount = count * message * 2 * (tp - 1) / tp
    formula = f"{count} all-reduces x {message:,.0f} B x 2 x {tp - 1}/{tp} + {count} latencies"
    return [
        Term(
            name="all-reduces",
            resource="link",
            formula=formula,
            amount=amount,
            unit="bytes",
            seconds=amount / hardware.link.bandwidth + count * hardware.link.latency_s,
            source=f"{hardware.link.name}: {hardware.link.source}",
        )
    ]


def _over(tp: int) -> str:
    return f" / {tp} devices" if tp > 1 else ""

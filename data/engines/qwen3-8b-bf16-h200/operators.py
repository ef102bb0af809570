"""The operators: a naive form (the specification), the kernel, and inputs to compare them on."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from . import naive
from .config import PAGE, ModelConfig


@dataclass(frozen=True)
class Operator:
    """`naive` and `kernel` take the same arguments and return the same tensors.

    inputs(config, rows, context, generator, device, dtype) draws arguments: `rows` tokens (at most
    32 for decode operators, a multiple of 64 for prefill), `context` past tokens. `mutated` names
    the arguments that a call also writes.
    """

    naive: Callable[..., Any]
    kernel: Callable[..., Any]
    inputs: Callable[..., dict[str, Any]]
    phase: str
    mutated: tuple[str, ...] = ()

    @property
    def rows(self) -> range:
        """The counts of tokens that the kernel takes."""
        return range(1, 33) if self.phase == "decode" else range(64, 1025, 64)

    def draw(self, engine: Any, rows: int, context: int, seed: int) -> dict[str, Any]:
        """Arguments in a loaded engine's own dimensions and formats."""
        like = engine.runner.model.weights.norm
        generator = torch.Generator(like.device).manual_seed(seed)
        return self.inputs(engine.config, rows, context, generator, str(like.device), like.dtype)


def _kernel(name: str) -> Callable[..., Any]:
    """A kernel by name; triton is imported at its first call, so that no GPU is needed to look."""

    def call(*args: Any, **kwargs: Any) -> Any:
        from . import kernels

        return getattr(kernels, name)(*args, **kwargs)

    return call


@dataclass
class _Draw:
    """Random tensors of the sizes that trained weights and activations have."""

    generator: torch.Generator
    device: str
    dtype: torch.dtype

    def normal(self, *shape: int, scale: float = 1.0, wide: bool = False) -> torch.Tensor:
        x = torch.randn(shape, generator=self.generator, device=self.device) * scale
        return x.to(torch.promote_types(self.dtype, torch.float32) if wide else self.dtype)

    def norm_weight(self, size: int) -> torch.Tensor:
        return 1 + self.normal(size, scale=0.1)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def squares(self, rows: int, width: int) -> torch.Tensor:
        return self.normal(rows, width // naive.SLOT, wide=True).abs() + naive.SLOT


def rope_tables(
    config: ModelConfig, length: int, device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [length, head_dim / 2] of position * theta^(-2 i / head_dim)."""
    i = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * config.rope_theta ** (
        -i / config.head_dim
    )
    dtype = torch.promote_types(dtype, torch.float32)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _weigh_inputs(c: ModelConfig, rows: int, context: int, *draw) -> dict[str, Any]:
    d = _Draw(*draw)
    source = d.normal(1000, c.hidden_size)
    return {
        "source": source,
        "rows": d.integers(1000, rows, dtype=torch.int64),
        "norm_weight": d.norm_weight(c.hidden_size),
    }


def _product_inputs(outputs: Callable[[ModelConfig], int]):
    def inputs(c: ModelConfig, rows: int, context: int, *draw) -> dict[str, Any]:
        d, h = _Draw(*draw), c.hidden_size
        weight = d.normal(outputs(c), h, scale=h**-0.5)
        return {
            "x": d.normal(rows, h),
            "squares": d.squares(rows, h),
            "weight": weight,
            "eps": c.rms_norm_eps,
        }

    return inputs


def _residual_inputs(width: Callable[[ModelConfig], int]):
    def inputs(c: ModelConfig, rows: int, context: int, *draw) -> dict[str, Any]:
        d, h, k = _Draw(*draw), c.hidden_size, width(c)
        tensors = {"x": d.normal(rows, k), "weight": d.normal(h, k, scale=k**-0.5)}
        return tensors | {"residual": d.normal(rows, h, wide=True), "norm_weight": d.norm_weight(h)}

    return inputs


def _cache_inputs(c: ModelConfig, d: _Draw, sequences: int, length: int) -> dict[str, Any]:
    """Caches with their pages in shuffled order."""
    pages = -(-length // PAGE)
    order = torch.randperm(sequences * pages, generator=d.generator, device=d.device) + 1
    shape = (sequences * pages + 1, c.num_key_value_heads, PAGE, c.head_dim)
    caches = {"k_cache": d.normal(*shape), "v_cache": d.normal(*shape)}
    return caches | {"block_table": order.view(sequences, pages).int()}


def _heads_inputs(c: ModelConfig, d: _Draw, length: int) -> dict[str, Any]:
    rope = rope_tables(c, length, d.device, d.dtype)
    return {"q_norm": d.norm_weight(c.head_dim), "k_norm": d.norm_weight(c.head_dim), "rope": rope}


def _decode_attention_inputs(c: ModelConfig, rows: int, context: int, *draw) -> dict[str, Any]:
    d = _Draw(*draw)
    positions = (context - d.integers(max(1, context // 2), rows)).clamp(min=0).int()
    positions[0] = context
    tensors = _heads_inputs(c, d, context + 1) | _cache_inputs(c, d, rows, context + 1)
    for row, position in enumerate(
        positions.tolist()
    ):  # what lies beyond the last token is never read
        for cache in ("k_cache", "v_cache"):
            tensors[cache][
                tensors["block_table"][row, position // PAGE].long(), :, position % PAGE :
            ] = float("nan")
    return {
        "qkv": d.normal(rows, c.qkv_size, wide=True),
        **tensors,
        "positions": positions,
        "eps": c.rms_norm_eps,
    }


def _store_inputs(c: ModelConfig, rows: int, context: int, *draw) -> dict[str, Any]:
    d = _Draw(*draw)
    tensors = _heads_inputs(c, d, context + rows) | _cache_inputs(c, d, 1, context + rows)
    span = {name: torch.tensor([value], dtype=torch.int32, device=d.device) for name, value in
            (("start", context), ("count", rows))}  # fmt: skip
    return {"qkv": d.normal(rows, c.qkv_size), **tensors, **span, "eps": c.rms_norm_eps}


def _prefill_attention_inputs(c: ModelConfig, rows: int, context: int, *draw) -> dict[str, Any]:
    tensors = _store_inputs(c, rows, context, *draw)
    query = tensors["qkv"][:, : c.num_attention_heads * c.head_dim].contiguous()
    return {"query": query} | {
        n: tensors[n] for n in ("k_cache", "v_cache", "block_table", "start", "count")
    }


def _add_norm_inputs(c: ModelConfig, rows: int, context: int, *draw) -> dict[str, Any]:
    d, h = _Draw(*draw), c.hidden_size
    tensors = {"residual": d.normal(rows, h, wide=True), "delta": d.normal(rows, h)}
    return tensors | {"weight": d.norm_weight(h), "eps": c.rms_norm_eps}


def _silu_inputs(c: ModelConfig, rows: int, context: int, *draw) -> dict[str, Any]:
    return {"gate_up": _Draw(*draw).normal(rows, 2 * c.intermediate_size)}


def _greedy_inputs(c: ModelConfig, rows: int, context: int, *draw) -> dict[str, Any]:
    logits = _Draw(*draw).normal(rows, c.vocab_size, wide=True)
    logits[:, c.vocab_size // 2 :: 7] = logits.max() + 1  # equal logits: the lowest id wins
    return {"logits": logits}


CACHES = ("k_cache", "v_cache")
OPERATORS: dict[str, Operator] = {
    "weigh_rows": Operator(naive.weigh_rows, _kernel("weigh_rows"), _weigh_inputs, "decode"),
    "qkv_product": Operator(
        naive.scaled_product,
        _kernel("scaled_product"),
        _product_inputs(lambda c: c.qkv_size),
        "decode",
    ),
    "decode_attention": Operator(
        naive.decode_attention,
        _kernel("decode_attention"),
        _decode_attention_inputs,
        "decode",
        CACHES,
    ),
    "output_product": Operator(
        naive.residual_product,
        _kernel("residual_product"),
        _residual_inputs(lambda c: c.num_attention_heads * c.head_dim),
        "decode",
    ),
    "gate_up_product": Operator(
        naive.gate_up_product,
        _kernel("gate_up_product"),
        _product_inputs(lambda c: 2 * c.intermediate_size),
        "decode",
    ),
    "down_product": Operator(
        naive.residual_product,
        _kernel("residual_product"),
        _residual_inputs(lambda c: c.intermediate_size),
        "decode",
    ),
    "head_product": Operator(
        naive.scaled_product,
        _kernel("scaled_product"),
        _product_inputs(lambda c: c.vocab_size),
        "decode",
    ),
    "greedy": Operator(naive.greedy, _kernel("greedy"), _greedy_inputs, "decode"),
    "add_norm": Operator(naive.add_norm, _kernel("add_norm"), _add_norm_inputs, "prefill"),
    "rotate_and_store": Operator(
        naive.rotate_and_store, _kernel("rotate_and_store"), _store_inputs, "prefill", CACHES
    ),
    "prefill_attention": Operator(
        naive.prefill_attention, _kernel("prefill_attention"), _prefill_attention_inputs, "prefill"
    ),
    "silu_multiply": Operator(
        naive.silu_multiply, _kernel("silu_multiply"), _silu_inputs, "prefill"
    ),
}


def bind(device: str) -> SimpleNamespace:
    """The kernels on a GPU, the naive forms elsewhere."""
    form = "kernel" if torch.device(device).type == "cuda" else "naive"
    return SimpleNamespace(
        **{name: getattr(operator, form) for name, operator in OPERATORS.items()}
    )

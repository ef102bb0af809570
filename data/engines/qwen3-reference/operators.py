"""The formulas, for any float dtype. T: tokens, N: query heads, K: key/value heads, D: head_dim,
P: positions in the cache. Norms and softmax compute in float32 at least."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Operator(NamedTuple):
    """naive: the specification; kernel: what runs on the spec's device (here: none but naive);
    draw: None, for the names are known by what they compute; rows: of tokens, that it takes;
    mutated: arguments that it writes."""

    naive: Callable[..., Tensor]
    kernel: Callable[..., Tensor]
    draw: None = None
    rows: range = range(1, 600)
    mutated: tuple[str, ...] = ()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · x / sqrt(mean(x²) + eps) over the last axis (Zhang and Sennrich 2019)."""
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * _wide(weight)).to(x.dtype)


def rope_table(positions: int, head_dim: int, theta: float) -> Tensor:
    """Angles [positions, D/2], float64: position · theta^(-2i/D) (Su et al. 2021)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    return torch.outer(torch.arange(positions, dtype=torch.float64), theta**-exponents)


def rope(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of each head: x [T, heads, D], angles [T, D/2]."""
    cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal grouped-query attention of the last T of P positions: [T, N, D] from k, v [P, K, D].

    Query head n reads key/value head n // (N / K); query t sees the positions 0 .. P - T + t.
    """
    n_queries, n_positions, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("tnd,pnd->ntp", _wide(q), _wide(k)) / math.sqrt(q.shape[2])
    visible = torch.ones(n_queries, n_positions, dtype=torch.bool, device=q.device)
    visible = visible.tril(n_positions - n_queries)
    weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
    return torch.einsum("ntp,pnd->tnd", weights, _wide(v)).to(q.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up (Shazeer 2020)."""
    return functional.silu(gate) * up


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T: [T, in] by [out, in]."""
    return functional.linear(x, weight)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


FORMULAS = (rms_norm, rope, attention, swiglu, linear)
OPERATORS: dict[str, Operator] = {f.__name__: Operator(f, f) for f in FORMULAS}

"""The formulas, for any float dtype. T: tokens, N: query heads, K: key/value heads, D: head_dim,
P: positions in the cache, H: value heads and G: key heads of Gated DeltaNet, E: experts. Norms,
softmax, gates and the recurrent state compute in float32 at least."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .formats import dequantise_nvfp4

L2_EPS = 1e-6  # below the squared length of a DeltaNet key


class Operator(NamedTuple):
    """naive: the specification; kernel: what runs on the spec's device (here: none but naive);
    draw: None, for the names are known by what they compute; rows: of tokens, that it takes;
    mutated: arguments that it writes."""

    naive: Callable[..., Any]
    kernel: Callable[..., Any]
    draw: None = None
    rows: range = range(1, 600)
    mutated: tuple[str, ...] = ()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(1 + weight) · x / sqrt(mean(x²) + eps) over the last axis: zero-centred weights."""
    return (_normalised(x, eps) * (1 + _wide(weight))).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · x / sqrt(mean(x²) + eps) · silu(gate) over the last axis: plain weights."""
    return (_normalised(x, eps) * _wide(weight) * functional.silu(_wide(gate))).to(x.dtype)


def rope_table(positions: int, rotary_dim: int, theta: float) -> Tensor:
    """Angles [positions, R/2], float64: position · theta^(-2i/R) (Su et al. 2021)."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    return torch.outer(torch.arange(positions, dtype=torch.float64), theta**-exponents)


def rope(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the pairs (i, i + R/2) of each head's first R dimensions, leave the others:
    x [T, heads, D], angles [T, R/2]."""
    cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    rotary_dim = 2 * angles.shape[1]
    first, second = x[..., :rotary_dim].chunk(2, dim=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*rotated, x[..., rotary_dim:]], dim=-1)


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


def causal_conv(x: Tensor, tail: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """silu of a convolution along time, each channel by itself: x [T, C], weight [C, width].

    tail [width - 1, C]: what came before x. Returns [T, C] and the tail for what comes after.
    """
    width = weight.shape[1]
    history = torch.cat([tail, x])
    windows = _wide(history).unfold(0, width, 1)
    mixed = torch.einsum("tcw,cw->tc", windows, _wide(weight))
    return functional.silu(mixed).to(x.dtype), history[-(width - 1) :]


def log_decay(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """-exp(A_log) · softplus(a + dt_bias): log of what a step leaves of the state; a [T, H]."""
    return -_wide(a_log).exp() * functional.softplus(_wide(a) + _wide(dt_bias))


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence of Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), token by token.

    q, k [T, G, Dk], v [T, H, Dv], g and beta [T, H], state [H, Dk, Dv]; value head h reads key head
    h // (H / G). Each token's S decays by exp(g), takes in k (beta (v - S^T k))^T and gives S^T q.
    Returns [T, H, Dv] and the state after the last token.
    """
    group = v.shape[1] // k.shape[1]
    queries = _unit(q).repeat_interleave(group, dim=1) / math.sqrt(q.shape[2])
    keys = _unit(k).repeat_interleave(group, dim=1)
    values, g, beta, state = _wide(v), _wide(g), _wide(beta), _wide(state)
    outputs = []
    for t in range(v.shape[0]):
        state = state * g[t].exp()[:, None, None]
        error = values[t] - torch.einsum("hkv,hk->hv", state, keys[t])
        state = state + keys[t][:, :, None] * (beta[t][:, None] * error)[:, None, :]
        outputs.append(torch.einsum("hkv,hk->hv", state, queries[t]))
    return torch.stack(outputs).to(v.dtype), state


def route(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest experts of each token and their softmax weights, made to sum to one.

    logits [T, E]; weights [T, k] in float32 at least, ids [T, k]; equal ones go to the lowest id.
    """
    probabilities = _wide(logits).softmax(dim=-1)
    weights, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :k], ids[:, :k]
    return weights / weights.sum(dim=-1, keepdim=True), ids


def experts(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Σ over a token's experts of weight · down (silu(gate x) · up x): x [T, hidden].

    weights, ids [T, k]; gate_up [E, 2 · ffn, hidden] holds gate rows, then up rows; down
    [E, hidden, ffn].
    """
    mixed = _wide(torch.zeros_like(x))
    for expert in ids.unique().tolist():
        tokens, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = linear(x[tokens], gate_up[expert]).chunk(2, dim=-1)
        output = linear(swiglu(gate, up), down[expert])
        mixed[tokens] += weights[tokens, choice, None] * output
    return mixed.to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up (Shazeer 2020)."""
    return functional.silu(gate) * up


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T: [T, in] by [out, in]."""
    return functional.linear(x, weight)


def _normalised(x: Tensor, eps: float) -> Tensor:
    wide = _wide(x)
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)


def _unit(x: Tensor) -> Tensor:
    wide = _wide(x)
    return wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + L2_EPS)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


FORMULAS = (rms_norm, gated_rms_norm, rope, attention, causal_conv, log_decay, gated_delta_rule)
FORMULAS += (route, experts, swiglu, linear, dequantise_nvfp4)
OPERATORS: dict[str, Operator] = {f.__name__: Operator(f, f) for f in FORMULAS}

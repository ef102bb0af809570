"""The model's operators as plain functions of tensors.

Each computes in float32 at least and returns the format of its input. On a CPU the specification
is what runs, so naive and kernel are one function.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional


def _wide(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or as it is when it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """(1 + weight) * x / sqrt(mean(x^2) + eps) over the last axis; weight [C] or as x, [..., C].

    The stored weight is the difference from one.
    """
    normed = _normed(x, eps)
    return torch.addcmul(normed, normed, weight.to(normed.dtype)).to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, gate: torch.Tensor
) -> torch.Tensor:
    """weight * norm(x) * silu(gate); x and gate [..., C], weight [C], here a plain factor."""
    return (_normed(x, eps) * weight * functional.silu(_wide(gate))).to(x.dtype)


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis."""
    return functional.rms_norm(_wide(x), x.shape[-1:], None, eps)


def rope(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + R/2) of the first R dimensions; x [T, heads, D], angles [T, R/2].

    Su et al. 2021, in its half-split form; dimensions from R on pass unchanged.
    """
    wide, half = _wide(x), angles.shape[-1]
    cos = angles.cos().to(wide.dtype).unsqueeze(1)
    sin = angles.sin().to(wide.dtype).unsqueeze(1)
    first, second, rest = wide.tensor_split((half, 2 * half), dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(rotated, dim=-1).to(x.dtype)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last T of P positions; q [T, N, D], k and v [P, K, D] -> [T, N, D].

    Query head n reads key and value head n // (N / K).
    """
    (count, heads, width), (context, kv_heads) = q.shape, k.shape[:2]
    rows = _wide(q).reshape(count, kv_heads, -1, width).permute(1, 2, 0, 3)
    rows = rows.reshape(kv_heads, -1, width)  # [K, N/K * T, D]
    scores = rows @ _wide(k).permute(1, 2, 0) * width**-0.5
    if count > 1:
        scores = scores.view(kv_heads, -1, count, context)
        hidden = torch.ones(count, context, dtype=torch.bool, device=q.device)
        hidden = hidden.triu(context - count + 1)
        scores = scores.masked_fill(hidden, -math.inf).view(kv_heads, -1, context)
    out = scores.softmax(-1) @ _wide(v).transpose(0, 1)
    out = out.view(kv_heads, -1, count, width).permute(2, 0, 1, 3)
    return out.reshape(count, heads, width).to(q.dtype)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up; both [T, C]."""
    return (functional.silu(_wide(gate)) * _wide(up)).to(gate.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T; x [T, in], weight [out, in]."""
    return functional.linear(x, weight)


def causal_conv(
    x: torch.Tensor, tail: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-channel causal convolution and silu; x [..., T, C], tail [..., W-1, C], weight [C, W].

    The tail holds the inputs before x, oldest first; the last tap meets the newest input.
    Returns y [..., T, C] and the tail [..., W-1, C] for what follows.
    """
    window = torch.cat((tail, x), dim=-2)
    taps = _wide(window).unfold(-2, weight.shape[-1], 1)  # [..., T, C, W]
    y = functional.silu((taps * weight).sum(-1)).to(x.dtype)
    return y, window[..., x.shape[-2] :, :]


def log_decay(a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """-exp(a_log) * softplus(a + dt_bias), never positive; a [T, H], a_log and dt_bias [H]."""
    shifted = _wide(a) + _wide(dt_bias)
    softplus = torch.logaddexp(shifted, torch.zeros_like(shifted))
    return -_wide(a_log).exp() * softplus


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence of Yang et al. 2024 (arXiv:2412.06464), token by token.

    q and k [T, G, Dk] (normed here), v [T, H, Dv], g (log decay) and beta [T, H],
    state [H, Dk, Dv] -> o [T, H, Dv], state after the last token. Value head h reads key head
    h // (H / G). Heads are independent: those of several sequences may stand side by side.
    """
    share = v.shape[1] // k.shape[1]
    queries = (_unit(_wide(q)) * q.shape[-1] ** -0.5).repeat_interleave(share, dim=1).unsqueeze(2)
    keys = _unit(_wide(k)).repeat_interleave(share, dim=1).unsqueeze(2)  # [T, H, 1, Dk]
    decay, values = _wide(g).exp()[..., None, None], _wide(v).unsqueeze(2)
    beta, carried, out = _wide(beta)[..., None, None], _wide(state), []
    for t in range(v.shape[0]):
        carried = carried * decay[t]
        error = (values[t] - keys[t] @ carried) * beta[t]  # [H, 1, Dv]
        carried = torch.baddbmm(carried, keys[t].transpose(1, 2), error)
        out.append(queries[t] @ carried)
    return torch.stack(out).squeeze(2).to(v.dtype), carried.to(state.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def route(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest experts of each token; logits [T, X] -> weights, ids [T, k].

    Weights sum to one; likeliest first, and of equal ones the lower id (hence the stable sort).
    """
    ranked, ids = _wide(logits).softmax(-1).sort(dim=-1, descending=True, stable=True)
    chosen = ranked[:, :k]
    return chosen / chosen.sum(-1, keepdim=True), ids[:, :k]


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Weighted sum of each token's experts, each touched expert's weights read once.

    x [T, C], weights and ids [T, k], gate_up [X, 2F, C], down [X, C, F] -> [T, C]. A token's terms
    are added in the order of its own choice, whatever else is in the batch.
    """
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    touched, counts = flat[order].unique_consecutive(return_counts=True)
    groups = x[order // ids.shape[1]].split(counts.tolist())
    terms = torch.empty(len(flat), x.shape[1], dtype=x.dtype, device=x.device)
    terms[order] = torch.cat(
        [
            linear(swiglu(*linear(rows, gate_up[e]).chunk(2, dim=-1)), down[e])
            for e, rows in zip(touched.tolist(), groups, strict=True)
        ]
    )
    return (_wide(terms).view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


class Operator(NamedTuple):
    """An operator as the gates see it: specification, what runs, and how to draw arguments."""

    naive: Callable[..., object]
    kernel: Callable[..., object]
    rows: range
    mutated: tuple[str, ...]
    draw: Callable[..., dict[str, object]] | None


def _operator(function: Callable[..., object]) -> Operator:
    return Operator(naive=function, kernel=function, rows=range(1, 513), mutated=(), draw=None)


OPERATORS: dict[str, Operator] = {
    function.__name__: _operator(function)
    for function in (
        rms_norm,
        gated_rms_norm,
        rope,
        attention,
        swiglu,
        linear,
        causal_conv,
        log_decay,
        gated_delta_rule,
        route,
        experts,
    )
}

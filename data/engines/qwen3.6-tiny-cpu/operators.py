"""The formulas, one function each, in plain torch: they are what the model calls.

Normalisations, decays and the recurrence are computed in float32 at least. Where it says [...],
any leading axes (a batch of sequences) are allowed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

L2_EPS = 1e-6


def _wide(x: Tensor) -> Tensor:
    """x in float32, or as it is where it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def scaled_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """scale · x / sqrt(mean(x²) + eps) over the last axis; x [..., C], scale [C]."""
    return F.rms_norm(x, scale.shape, scale, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zero-centred norm: (1 + weight) · x / sqrt(mean(x²) + eps); x [..., C], weight [C]."""
    return scaled_norm(_wide(x), 1 + _wide(weight), eps).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · norm(x) · silu(gate); x and gate [..., C], weight [C]."""
    return (scaled_norm(_wide(x), _wide(weight), eps) * F.silu(_wide(gate))).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + R/2) of the first R dimensions (Su et al. 2021, half-split).

    x [T, heads, D]; cos and sin [T, 1, R/2], in the format of x.
    """
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = (first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :])
    return torch.cat(turned, dim=-1)


def rope(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, D] by angles [T, R/2] (float64)."""
    wide, angles = _wide(x), angles[:, None]
    return rotate(wide, angles.cos().to(wide.dtype), angles.sin().to(wide.dtype)).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal grouped-query attention; q [T, N, D] are the last T of P positions, k and v [P, K, D].

    Query head n reads key/value head n // (N / K). Returns [T, N, D].
    """
    (tokens, heads, dim), (positions, kv_heads) = q.shape, k.shape[:2]
    grouped = q.view(tokens, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = torch.bmm(grouped * dim**-0.5, k.permute(1, 2, 0))
    if tokens > 1:
        later = torch.ones(tokens, positions, dtype=torch.bool, device=q.device)
        later = later.triu(positions - tokens + 1)
        scores.view(kv_heads, -1, tokens, positions).masked_fill_(later, float("-inf"))
    weights = _wide(scores).softmax(-1).to(q.dtype)
    mixed = torch.bmm(weights, v.transpose(0, 1)).view(heads, tokens, dim)
    return mixed.transpose(0, 1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up; both [..., C]."""
    return F.silu(gate) * up


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] times the transpose of weight [out, in]."""
    return F.linear(x, weight)


def causal_conv(x: Tensor, tail: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution, then silu; the last tap meets the newest token.

    x [..., T, C]; tail [..., W-1, C] are the inputs before it, oldest first; weight [C, W].
    Returns ([..., T, C], the new tail).
    """
    inputs = torch.cat((tail, x), dim=-2)
    windows = inputs.unfold(-2, weight.shape[-1], 1)  # [..., T, C, W]
    return F.silu((windows * weight).sum(-1)), inputs[..., x.shape[-2] :, :]


def log_decay(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """-exp(a_log) · softplus(a + dt_bias); a [..., H], a_log and dt_bias [H]."""
    # Above the threshold torch returns x itself: at 40 the difference is below float64's rounding.
    return -_wide(a_log).exp() * F.softplus(_wide(a) + _wide(dt_bias), threshold=40.0)


def _per_step(x: Tensor, repeat: int) -> Tensor:
    """[B, T, heads, D] to [T, B · heads · repeat, 1, D], each head repeated in place."""
    batch, tokens, heads, dim = x.shape
    spread = x.transpose(0, 1).unsqueeze(3).expand(tokens, batch, heads, repeat, dim)
    return spread.reshape(tokens, batch * heads * repeat, 1, dim)


def delta_rule_(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Gated delta rule (Yang et al. 2024) over T tokens of B sequences; writes `state` in place.

    q, k [B, T, G, Dk] not yet normed; v [B, T, H, Dv]; g (log decay) and beta [B, T, H];
    state [B, H, Dk, Dv], contiguous. All in one wide format. Returns o [B, T, H, Dv].
    """
    batch, tokens, heads, dim = v.shape
    groups, width = q.shape[2:]
    # x / sqrt(sum(x²) + eps) is rms_norm with eps / width, over sqrt(width); q has one more.
    q = F.rms_norm(q, (width,), None, L2_EPS / width) * (1 / width)
    k = F.rms_norm(k, (width,), None, L2_EPS / width) * width**-0.5
    q, k = _per_step(q, heads // groups), _per_step(k, heads // groups)
    v, beta = _per_step(v, 1), _per_step(beta.unsqueeze(-1), 1)
    decay = _per_step(g.exp().unsqueeze(-1), 1)
    s = state.view(batch * heads, width, dim)
    out = torch.empty_like(v)
    for t in range(tokens):
        s.mul_(decay[t])
        error = torch.baddbmm(v[t], k[t], s, alpha=-1).mul_(beta[t])
        s.baddbmm_(k[t].transpose(1, 2), error)
        torch.bmm(q[t], s, out=out[t])
    return out.view(tokens, batch, heads, dim).transpose(0, 1)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """delta_rule_ for one sequence, q, k [T, G, Dk] ..., state [H, Dk, Dv]: (o, new state)."""
    new = _wide(state).clone()[None].contiguous()
    wide = [_wide(x)[None] for x in (q, k, v, g, beta)]
    return delta_rule_(*wide, new)[0].to(v.dtype), new[0]


def route(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest of E experts; logits [T, E] to (weights [T, k] that sum to one, ids [T, k]).

    Likeliest first; equal probabilities go to the lower id, which a stable sort grants.
    """
    chance, ids = _wide(logits).softmax(-1).sort(dim=-1, descending=True, stable=True)
    chance, ids = chance[:, :k], ids[:, :k]
    return chance / chance.sum(-1, keepdim=True), ids


def _experts_few(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Experts for a few tokens: each token's matrices are gathered into one batched product."""
    (tokens, k), ffn = ids.shape, down.shape[-1]
    flat = ids.reshape(-1)
    first = gate_up.index_select(0, flat).view(tokens, k * 2 * ffn, -1)
    gate, up = torch.bmm(first, x.unsqueeze(-1)).view(tokens, k, 2, ffn).unbind(2)
    hidden = swiglu(gate, up) * weights.unsqueeze(-1)
    out = torch.bmm(down.index_select(0, flat), hidden.view(tokens * k, ffn, 1))
    return out.view(tokens, k, -1).sum(1)


def _experts_many(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Experts for many tokens: each touched expert once, with its tokens as rows."""
    out = x.new_empty(*ids.shape, x.shape[-1])
    for expert in ids.unique().tolist():
        rows, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = linear(x[rows], gate_up[expert]).chunk(2, dim=-1)
        out[rows, choice] = linear(swiglu(gate, up), down[expert])
    return (out * weights.unsqueeze(-1)).sum(1)


def experts(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Weighted sum of each token's chosen experts, in the order of its own choice.

    x [T, C]; weights, ids [T, k]; gate_up [E, 2·ffn, C] (gate rows first); down [E, C, ffn].
    Returns [T, C].
    """
    weights = weights.to(x.dtype)
    # Gathering copies one expert per choice: cheaper than a loop until that is all of them.
    few = ids.numel() <= gate_up.shape[0]
    return (_experts_few if few else _experts_many)(x, weights, ids, gate_up, down)


@dataclass(frozen=True)
class Operator:
    """An operator's specification and what runs on the device: the same on a CPU."""

    naive: Callable
    kernel: Callable
    rows: range = range(1, 513)
    mutated: tuple[str, ...] = ()
    draw: None = None


_FUNCTIONS = (
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
OPERATORS = {function.__name__: Operator(function, function) for function in _FUNCTIONS}

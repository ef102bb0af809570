"""The operators in plain torch, for any float dtype: what the kernels are held to.

Rows are tokens. A *segment* is a run of rows of one sequence: (slot, start position, length).
Formulas: arXiv 2412.06464 (gated delta rule) and the model's published configuration.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .config import Config
from .formats import Matrix

Segments = Sequence[tuple[int, int, int]]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zero-centred RMS norm over the last axis: x / rms(x) * (1 + weight)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight.to(x.dtype))


def linear(x: Tensor, matrix: Matrix) -> Tensor:
    """x [rows, K] times the exact weights: [rows, N]."""
    return x @ matrix.dense(x.dtype).T


def causal_conv(x: Tensor, weight: Tensor, history: Tensor) -> Tensor:
    """SiLU of a depthwise causal convolution.

    x [T, C] new columns; weight [C, 4]; history [3, C] the columns before x, oldest first.
    """
    window = torch.cat((history.to(x.dtype), x)).unfold(0, 4, 1)  # [T, C, 4]
    return F.silu((window * weight.to(x.dtype)).sum(-1))


def read_history(ring: Tensor, start: int) -> Tensor:
    """The three columns before position `start` of a ring [4, C] indexed by position modulo 4."""
    rows = [ring[(start - back) % 4] * (start >= back) for back in (3, 2, 1)]
    return torch.stack(rows)


def write_history(ring: Tensor, x: Tensor, start: int) -> None:
    """Keep the last columns of x [T, C], which begin at position `start`."""
    for row in range(max(0, len(x) - 4), len(x)):
        ring[(start + row) % 4] = x[row].to(ring.dtype)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Gated delta rule, token by token.

    q, k [T, heads, Dk]; v [T, heads, Dv]; log_decay, beta [T, heads]; state [heads, Dv, Dk].
    Returns outputs [T, heads, Dv] and the new state.
    """
    out = []
    for t in range(len(q)):
        state = state * log_decay[t].exp()[:, None, None]
        error = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + error[:, :, None] * k[t][:, None, :]
        out.append(torch.einsum("hvk,hk->hv", state, q[t]))
    return torch.stack(out), state


def gdn_mixer(
    qkv: Tensor,
    ab: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    ring: Tensor,
    states: Tensor,
    segments: Segments,
    config: Config,
) -> Tensor:
    """Convolution, gates and delta rule of all segments; `ring` and `states` change in place.

    qkv [R, conv_width]; ab [R, 2 * value_heads] (a then b); ring [slots, 4, conv_width];
    states [slots, value_heads, Dv, Dk] float32. Returns outputs [R, value_heads * Dv].
    """
    outputs, row = [], 0
    for slot, start, length in segments:
        x = qkv[row : row + length]
        y = causal_conv(x, conv_weight, read_history(ring[slot], start))
        write_history(ring[slot], x, start)
        a, b = ab[row : row + length].split(config.value_heads, -1)
        decay = -a_log.to(x.dtype).exp() * F.softplus(a + dt_bias.to(x.dtype))
        q, k, v = _split_heads(y, config)
        state = states[slot].to(x.dtype) if start else torch.zeros_like(states[slot], dtype=x.dtype)
        out, state = delta_rule(q, k, v, decay, b.sigmoid(), state)
        states[slot] = state.to(states.dtype)
        outputs.append(out.flatten(1))
        row += length
    return torch.cat(outputs)


def _split_heads(y: Tensor, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Unit-length q (scaled) and k of each value head, and v."""
    width = config.key_heads * config.key_dim
    q, k, v = y.split((width, width, config.value_width), -1)
    group = config.value_heads // config.key_heads
    unit = lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)  # noqa: E731
    q = unit(q.unflatten(-1, (-1, config.key_dim))) * config.key_dim**-0.5
    k = unit(k.unflatten(-1, (-1, config.key_dim)))
    repeat = lambda x: x.repeat_interleave(group, 1)  # noqa: E731
    return repeat(q), repeat(k), v.unflatten(-1, (-1, config.value_dim))


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float, head_dim: int) -> Tensor:
    """RMS norm of each value head (plain weight), times SiLU of the gate: [R, value_width]."""
    heads = o.unflatten(-1, (-1, head_dim))
    normed = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + eps) * weight.to(o.dtype)
    return normed.flatten(-2) * F.silu(z)


def rope(x: Tensor, positions: Tensor, dim: int, theta: float) -> Tensor:
    """Rotate the first `dim` elements (half-split pairs) of x [R, heads, D] by position."""
    inverse = theta ** (-torch.arange(0, dim, 2, device=x.device, dtype=torch.float64) / dim)
    angle = (positions.to(torch.float64)[:, None] * inverse)[:, None, :]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right, rest = x[..., : dim // 2], x[..., dim // 2 : dim], x[..., dim:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), -1)


def attention(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    pages: Tensor,
    page_table: Tensor,
    segments: Segments,
    config: Config,
) -> Tensor:
    """Normed, rotated, gated grouped-query attention over a paged cache that grows in place.

    qkv [R, qkv_width] (per head query then gate; keys; values); pages [n, 2, kv_heads, page, D];
    page_table [slots, max pages]. Returns [R, heads * D].
    """
    page, outputs, row = pages.shape[3], [], 0
    for slot, start, length in segments:
        query, gate, key, value = _split_qkv(qkv[row : row + length], q_norm, k_norm, start, config)
        positions = torch.arange(start, start + length, device=qkv.device)
        where = page_table[slot, positions // page].long()
        pages[where, 0, :, positions % page] = key.to(pages.dtype)
        pages[where, 1, :, positions % page] = value.to(pages.dtype)
        used = page_table[slot, : (start + length - 1) // page + 1].long()
        keys, values = (
            pages[used, i].transpose(1, 2).flatten(0, 1)[: start + length].to(qkv.dtype)
            for i in (0, 1)
        )
        outputs.append(_attend(query, keys, values, positions) * gate.sigmoid())
        row += length
    return torch.cat(outputs)


def _split_qkv(x: Tensor, q_norm: Tensor, k_norm: Tensor, start: int, config: Config):
    """Rotated queries [T, heads, D], gates [T, heads * D], rotated keys and values [T, kv, D]."""
    dim, kv = config.head_dim, config.kv_heads
    both, key, value = x.split((2 * config.attention_width, kv * dim, kv * dim), -1)
    query, gate = both.unflatten(-1, (config.heads, 2, dim)).unbind(2)
    positions = torch.arange(start, start + len(x), device=x.device)
    turn = lambda y, w: rope(  # noqa: E731
        rms_norm(y, w, config.rms_eps), positions, config.rope_dim, config.rope_theta
    )
    key, value = key.unflatten(-1, (kv, dim)), value.unflatten(-1, (kv, dim))
    return turn(query, q_norm), gate.flatten(1), turn(key, k_norm), value


def _attend(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Causal softmax attention: query [T, heads, D], keys and values [S, kv heads, D]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("thd,shd->hts", query, keys) * query.shape[-1] ** -0.5
    hidden = torch.arange(len(keys), device=query.device)[None] > positions[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, values).flatten(1)


def top_experts(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of logits [R, E] (equal ones: lowest id first) and their softmax weights."""
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return ids[:, :k], values[:, :k].softmax(-1)


def swiglu(x: Tensor, gate_up: Tensor) -> Tensor:
    """silu(x G^T) * (x U^T) with gate_up [2 * width, K], gate rows first."""
    gate, up = (x @ gate_up.T).chunk(2, -1)
    return F.silu(gate) * up


def moe(
    x: Tensor,
    logits: Tensor,
    gate_up: Matrix,
    down: Matrix,
    shared: Tensor,
    shared_down: Matrix,
    top_k: int,
    ids: Tensor | None = None,
) -> Tensor:
    """Routed experts plus the gated shared expert: [R, H].

    x [R, H] normed; logits [R, E + 1], the last column being the shared expert's gate;
    shared [R, shared width] the shared expert's SwiGLU output.
    """
    chosen, weights = top_experts(logits[:, :-1], top_k)
    out = torch.sigmoid(logits[:, -1:]) * linear(shared, shared_down)
    for expert in chosen.unique().tolist():
        row, rank = (chosen == expert).nonzero(as_tuple=True)
        hidden = swiglu(x[row], deinterleave(gate_up.dense(x.dtype, expert)))
        y = hidden @ down.dense(x.dtype, expert).T
        out = out.index_add(0, row, y * weights[row, rank, None])
    return out


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Gate and up rows in turns of eight, so that one 16-row tile holds both of 8 channels."""
    pairs = torch.stack((gate.unflatten(-2, (-1, 8)), up.unflatten(-2, (-1, 8))), -3)
    return pairs.flatten(-4, -2)


def deinterleave(rows: Tensor) -> Tensor:
    """Inverse of interleave(): gate rows, then up rows."""
    return rows.unflatten(-2, (-1, 2, 8)).transpose(-4, -3).flatten(-4, -2)


def log_softmax_at(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log probability of tokens [R] under logits [R, V]."""
    return logits.gather(1, tokens[:, None].long())[:, 0] - logits.logsumexp(-1)

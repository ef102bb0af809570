"""Each operator of the engine in plain torch, for any float dtype: the specification, and what runs
without a GPU.

Shapes: T or M tokens (rows), H hidden size, N outputs, D head dimension, V vocabulary. A "weighted"
row is residual * norm_weight, not yet divided by the row's root mean square; `squares` [M, H / 16]
holds the sums of residual^2 over 16 columns each, so that whoever multiplies the row can scale its
result instead.
"""

import torch
import torch.nn.functional as F

from .group import Group

SLOT = 16
ALONE = Group()


def _weighted(
    residual: torch.Tensor, norm_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    squares = residual.square().unflatten(1, (-1, SLOT)).sum(-1)
    return residual, (residual * norm_weight).to(norm_weight.dtype), squares


def _row_scale(squares: torch.Tensor, width: int, eps: float) -> torch.Tensor:
    return torch.rsqrt(squares.sum(-1, keepdim=True) / width + eps)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums and residuals of bfloat16 values are float32."""
    return torch.promote_types(dtype, torch.float32)


def _multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    dtype = _sum_dtype(weight.dtype)
    return x.to(dtype) @ weight.to(dtype).T


def weigh_rows(
    source: torch.Tensor, rows: torch.Tensor, norm_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """residual = source[rows] [M, H], its weighted row and squares. `source` is the embedding or a
    residual.
    """
    return _weighted(source[rows].to(_sum_dtype(source.dtype)), norm_weight)


def scaled_product(
    x: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """rmsnorm(residual) @ weight.T [M, N] in float32 or wider, from the weighted rows x [M, H];
    weight [N, H].
    """
    return _multiply(x, weight) * _row_scale(squares, x.shape[1], eps)


def gate_up_product(
    x: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """silu(gate) * up [M, I] of the normed rows; weight [2 I, H] holds gate's rows, then up's."""
    return silu_multiply(scaled_product(x, squares, weight, eps)).to(x.dtype)


def residual_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    group: Group = ALONE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """residual + the ranks' sum of x @ weight.T [M, H], its weighted row for the next norm, and
    squares; x [M, K] and weight [H, K] hold this rank's columns.
    """
    return _weighted(residual + group.sum(_multiply(x, weight)), norm_weight)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rotate(
    x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor
) -> torch.Tensor:
    """Rotary embedding by halves of x [T, heads, D]; rope = cosines, sines [positions, D / 2]."""
    cos, sin = (table[positions][:, None].to(x.dtype) for table in rope)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _split_heads(
    qkv: torch.Tensor, q_norm, k_norm, rope, positions: torch.Tensor, kv_heads: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normed and rotated queries, keys, and values, [T, heads, D] each."""
    heads = qkv.to(_sum_dtype(qkv.dtype)).unflatten(1, (-1, q_norm.shape[0]))
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    return (
        _rotate(_norm(q, q_norm, eps), rope, positions),
        _rotate(_norm(k, k_norm, eps), rope, positions),
        v,
    )


def _store(
    cache: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, positions: torch.Tensor
) -> None:
    cache[pages.long(), :, positions.long() % cache.shape[2]] = values.to(cache.dtype)


def _gather(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens behind one row of a block table: [heads, length, D]."""
    return cache[pages.long()].transpose(0, 1).flatten(1, 2)[:, :length]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int) -> torch.Tensor:
    """Causal attention of queries [T, heads, D] at positions first.. over k, v [kv heads, length,
    D].
    """
    group = q.shape[1] // k.shape[0]
    k, v = (x.to(q.dtype).repeat_interleave(group, 0) for x in (k, v))
    scores = torch.einsum("thd,hsd->hts", q, k) * q.shape[-1] ** -0.5
    at = torch.arange(first, first + q.shape[0], device=q.device)
    unseen = torch.arange(k.shape[1], device=q.device) > at[:, None]
    return torch.einsum(
        "hts,hsd->thd", scores.masked_fill(unseen, float("-inf")).softmax(-1), v
    ).flatten(1)


def decode_attention(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """One new token per row: norm, rotate, write its key and value into the pages, attend; out [M,
    heads * D].

    qkv [M, (heads + 2 kv heads) * D]; caches [pages, kv heads, 64, D]; block_table [M, pages] and
    positions [M] int32.
    """
    q, k, v = _split_heads(qkv, q_norm, k_norm, rope, positions, k_cache.shape[1], eps)
    pages = block_table.gather(1, (positions.long() // k_cache.shape[2])[:, None])[:, 0]
    _store(k_cache, k, pages, positions)
    _store(v_cache, v, pages, positions)
    out = []
    for row, last in enumerate(positions.tolist()):
        keys, values = (_gather(cache, block_table[row], last + 1) for cache in (k_cache, v_cache))
        out.append(_attend(q[row : row + 1], keys, values, last))
    return torch.cat(out).to(q_norm.dtype)


def rotate_and_store(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    start: torch.Tensor,
    count: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Queries [T, heads * D] of one sequence's chunk at positions start.., normed and rotated; its
    keys and values go into the pages of block_table [1, pages]. start, count int32 [1]; rows from
    `count` on are padding.
    """
    positions = start + torch.arange(qkv.shape[0], device=qkv.device).clamp(max=int(count) - 1)
    q, k, v = _split_heads(qkv, q_norm, k_norm, rope, positions, k_cache.shape[1], eps)
    real = positions[: int(count)]
    pages = block_table[0, real // k_cache.shape[2]]
    _store(k_cache, k[: int(count)], pages, real)
    _store(v_cache, v[: int(count)], pages, real)
    return q.flatten(1).to(qkv.dtype)


def prefill_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    start: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    """Causal attention [T, heads * D] of a chunk over its pages, its own tokens stored before;
    padding rows are zero.
    """
    first, rows = int(start), int(count)
    keys, values = (_gather(cache, block_table[0], first + rows) for cache in (k_cache, v_cache))
    q = query[:rows].unflatten(1, (-1, k_cache.shape[3])).to(_sum_dtype(query.dtype))
    out = torch.zeros_like(query)
    out[:rows] = _attend(q, keys, values, first).to(query.dtype)
    return out


def add_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + delta [T, H] and its RMS norm in the dtype of `weight`."""
    new = residual if delta is None else residual + delta
    return new, _norm(new, weight, eps).to(weight.dtype)


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up [T, I] of gate_up [T, 2 I]."""
    gate, up = gate_up.to(_sum_dtype(gate_up.dtype)).chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def greedy(logits: torch.Tensor, group: Group = ALONE) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit's id [M] (int64; the lowest of equals) and its log-probability [M];
    logits [M, V / world] of this rank's part of the vocabulary.

    Logits that are not numbers still give some id: such a row must not harm its neighbours.
    """
    logits = group.join_columns(logits)
    top = logits.max(-1, keepdim=True).values
    ids = torch.arange(logits.shape[1], device=logits.device)
    tokens = torch.where(logits == top, ids, logits.shape[1]).min(-1).values
    return tokens.clamp(max=logits.shape[1] - 1), top[:, 0] - logits.logsumexp(-1)

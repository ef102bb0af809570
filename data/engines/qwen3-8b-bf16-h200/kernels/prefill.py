"""Triton kernels of prefill: norm, rotation and cache write of a chunk, and its causal attention
over KV pages, which the tensor copy engine fetches.
"""

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

BLOCK = 64  # tokens of a block of attention


@triton.jit
def _store_kernel(
    qkv, q_norm, k_norm, cosine, sine, query, k_cache, v_cache, table, start_at, count_at, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(count_at)
    position = tl.load(start_at) + tl.minimum(i, count - 1)
    inside = (i < count)[:, None]
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, HALF)
    source = qkv + (i.to(tl.int64) * (HEADS + 2 * KV_HEADS) + head)[:, None] * D + d[None, :]
    a, b = tl.load(source).to(tl.float32), tl.load(source + HALF).to(tl.float32)
    kv_head = head - HEADS - tl.where(head < HEADS + KV_HEADS, 0, KV_HEADS)
    page = tl.load(table + position // PAGE).to(tl.int64)
    to = ((page * KV_HEADS + kv_head) * PAGE + position % PAGE)[:, None] * D + d[None, :]
    if head >= HEADS + KV_HEADS:
        tl.store(v_cache + to, a.to(v_cache.dtype.element_ty), mask=inside)
        tl.store(v_cache + to + HALF, b.to(v_cache.dtype.element_ty), mask=inside)
    else:
        weight = q_norm if head < HEADS else k_norm
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        a *= scale * tl.load(weight + d).to(tl.float32)[None, :]
        b *= scale * tl.load(weight + HALF + d).to(tl.float32)[None, :]
        c = tl.load(cosine + position[:, None] * HALF + d[None, :])
        s = tl.load(sine + position[:, None] * HALF + d[None, :])
        low, high = (
            (a * c - b * s).to(query.dtype.element_ty),
            (b * c + a * s).to(query.dtype.element_ty),
        )
        if head < HEADS:
            out = query + (i.to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
            tl.store(out, low)
            tl.store(out + HALF, high)
        else:
            tl.store(k_cache + to, low, mask=inside)
            tl.store(k_cache + to + HALF, high, mask=inside)


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
    """See naive.rotate_and_store; rows must be a multiple of 16."""
    _, kv_heads, page, dim = k_cache.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    query = torch.empty(qkv.shape[0], heads * dim, dtype=qkv.dtype, device=qkv.device)
    grid = (qkv.shape[0] // 16, heads + 2 * kv_heads)
    _store_kernel[grid](
        qkv, q_norm, k_norm, *rope, query, k_cache, v_cache, block_table, start, count, eps,
        HEADS=heads, KV_HEADS=kv_heads, PAGE=page, D=dim, BLOCK=16, num_warps=4,
    )  # fmt: skip
    return query


@triton.jit
def _attend_pages(
    q, total, top, acc, keys, values, table, row, kv_head, first, last, scale_log2,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    token = tl.arange(0, PAGE)
    for page in range(first, last):
        at = (tl.load(table + page) * KV_HEADS + kv_head) * PAGE
        s = tl.dot(q, keys.load([at, 0]).T)
        if MASKED:
            s = tl.where(page * PAGE + token[None, :] <= row[:, None], s, float("-inf"))
        most = tl.maximum(top, tl.max(s, 1) * scale_log2)
        p = tl.exp2(s * scale_log2 - most[:, None])
        keep = tl.exp2(top - most)
        total = total * keep + tl.sum(p, 1)
        v = values.load([at, 0])
        if MASKED:  # stale bits beyond the last token could be NaN, and 0 * NaN is not 0
            v = tl.where(page * PAGE + token[:, None] <= tl.max(row, 0), v, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None])
        top = most
    return total, top, acc


@triton.jit
def _attention_kernel(
    query, keys, values, table, start_at, count_at, out, scale_log2,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first
    head = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    start, count = tl.load(start_at), tl.load(count_at)
    if block * BLOCK < count:
        row = start + tl.minimum(i, count - 1)
        at = (i.to(tl.int64) * HEADS + head)[:, None] * D + tl.arange(0, D)[None, :]
        q = tl.load(query + at)
        kv_head = head // (HEADS // KV_HEADS)
        total = tl.zeros([BLOCK], tl.float32)
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        acc = tl.zeros([BLOCK, D], tl.float32)
        full = (start + block * BLOCK + 1) // PAGE
        pages = (start + tl.minimum(block * BLOCK + BLOCK, count) - 1) // PAGE + 1
        total, top, acc = _attend_pages(
            q, total, top, acc, keys, values, table, row, kv_head, 0, full, scale_log2,
            KV_HEADS, PAGE, False,
        )  # fmt: skip
        total, top, acc = _attend_pages(
            q, total, top, acc, keys, values, table, row, kv_head, full, pages, scale_log2,
            KV_HEADS, PAGE, True,
        )  # fmt: skip
        tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty))


def prefill_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    start: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    """See naive.prefill_attention; rows must be a multiple of 64. Rows from `count` on are
    undefined.
    """
    _, kv_heads, page, dim = k_cache.shape
    heads = query.shape[1] // dim
    keys, values = (
        TensorDescriptor(cache, [cache.numel() // dim, dim], [dim, 1], [page, dim])
        for cache in (k_cache, v_cache)
    )
    out = torch.empty_like(query)
    _attention_kernel[(heads, query.shape[0] // BLOCK)](
        query, keys, values, block_table, start, count, out, dim**-0.5 * math.log2(math.e),
        HEADS=heads, KV_HEADS=kv_heads, PAGE=page, D=dim, BLOCK=BLOCK,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out

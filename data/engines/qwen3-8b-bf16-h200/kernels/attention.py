"""Launch of attention.cu: how many blocks share one key-value head of a sequence."""

import functools
import math

import torch

from .cuda import CudaKernel

STAGES = 3
STAGE_BYTES = 2 * 64 * 128 * 2


def _splits(sequences: int, kv_heads: int) -> int:
    """Enough blocks for 132 multiprocessors, at most the 8 that a cluster may have; a block takes a
    whole sequence only where each multiprocessor has two.
    """
    alone = 1 if sequences * kv_heads >= 256 else 2
    return next(s for s in (alone, 2, 4, 8) if s == 8 or s * sequences * kv_heads >= 128)


def _groups(blocks: int) -> int:
    """Two groups of warps where a block is alone on its multiprocessor: half the turns."""
    return 2 if blocks <= 66 else 1


@functools.cache
def _kernel(heads: int, kv_heads: int, splits: int, groups: int) -> CudaKernel:
    stages = STAGES if groups == 1 else 2
    shape = dict(HEADS=heads, KV_HEADS=kv_heads, SPLITS=splits, GROUPS=groups, STAGES=stages)
    shared = stages * groups * STAGE_BYTES
    return CudaKernel("attention.cu", "decode_attention", shape, 128 * groups, shared, splits)


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
    """See naive.decode_attention."""
    rows, kv_heads, dim = qkv.shape[0], k_cache.shape[1], k_cache.shape[3]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    out = torch.empty(rows, heads * dim, dtype=torch.bfloat16, device=qkv.device)
    splits = _splits(rows, kv_heads)
    scale_log2 = dim**-0.5 * math.log2(math.e)
    past = (*rope, k_cache, v_cache, block_table, positions)
    settings = (block_table.stride(0), eps, scale_log2)
    kernel = _kernel(heads, kv_heads, splits, _groups(splits * kv_heads * rows))
    kernel((splits, kv_heads, rows), qkv, q_norm, k_norm, *past, out, *settings)
    return out

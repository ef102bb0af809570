"""Greedy choice over a vocabulary that ranks share: chunks in Triton, rows and ranks in pick.cu.

A rank sends three numbers a row: its largest logit, the id, and the sum of exponentials.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..group import Group
from ..naive import ALONE
from .cuda import CudaKernel
from .exchange import arguments

CHUNK = 2048  # logits behind one partial maximum


@triton.jit
def _chunk_kernel(logits, top, top_id, total, width, chunks, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    gdc_launch_dependents()
    gdc_wait()
    x = tl.load(logits + row.to(tl.int64) * width + at, mask=at < width, other=float("-inf"))
    most = tl.max(x, 0)
    tl.store(top + row * chunks + chunk, most)
    tl.store(top_id + row * chunks + chunk, tl.min(tl.where(x == most, at, width), 0))
    tl.store(total + row * chunks + chunk, tl.sum(tl.exp(x - most), 0))


@functools.cache
def _pick(world: int) -> CudaKernel:
    return CudaKernel("pick.cu", "pick", {"WORLD": world}, 32, 0, 1)


def greedy(logits: torch.Tensor, group: Group = ALONE) -> tuple[torch.Tensor, torch.Tensor]:
    """See naive.greedy."""
    rows, width = logits.shape
    chunks = triton.cdiv(width, CHUNK)
    top = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    top_id, total = torch.empty_like(top, dtype=torch.int32), torch.empty_like(top)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    parts = (top, top_id, total)
    _chunk_kernel[(rows, chunks)](
        logits, *parts, width, chunks, CHUNK=CHUNK, num_warps=8, launch_pdl=True
    )
    sizes = (chunks, width, *arguments(group))
    _pick(group.world)((rows, 1, 1), *parts, tokens, logprobs, *sizes)
    return tokens, logprobs

"""Triton kernels that work row by row: embedding rows, norms, SiLU, greedy choice."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SLOT = tl.constexpr(32)
CHUNK = 2048  # logits behind one partial maximum


@triton.jit
def _weigh_kernel(source, rows, weight, residual, weighted, squares, width, SLOTS: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, SLOTS)[:, None] * SLOT + tl.arange(0, SLOT)[None, :]
    inside = at < width
    r = tl.load(source + tl.load(rows + row) * width + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual + row * width + at, r, mask=inside)
    tl.store(weighted + row * width + at, (r * w).to(weighted.dtype.element_ty), mask=inside)
    slot = tl.arange(0, SLOTS)
    tl.store(squares + row * (width // SLOT) + slot, tl.sum(r * r, 1), mask=slot < width // SLOT)


def weigh_rows(
    source: torch.Tensor, rows: torch.Tensor, norm_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See naive.weigh_rows."""
    count, width = rows.shape[0], source.shape[1]
    residual = torch.empty(count, width, dtype=torch.float32, device=source.device)
    weighted = torch.empty_like(residual, dtype=torch.bfloat16)
    squares = torch.empty(count, width // 32, dtype=torch.float32, device=source.device)
    slots = triton.next_power_of_2(width // 32)
    _weigh_kernel[(count,)](
        source, rows, norm_weight, residual, weighted, squares, width, SLOTS=slots
    )
    return residual, weighted, squares


@triton.jit
def _add_norm_kernel(
    residual, delta, weight, out, width, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.arange(0, BLOCK)
    inside = at < width
    base = tl.program_id(0).to(tl.int64) * width
    r = tl.load(residual + base + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        r += tl.load(delta + base + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + base + at, r, mask=inside)
    scale = tl.rsqrt(tl.sum(r * r, 0) / width + eps)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + base + at, (r * scale * w).to(out.dtype.element_ty), mask=inside)


def add_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See naive.add_norm; the sum takes the memory of `residual`, often still in L2."""
    count, width = residual.shape
    out = torch.empty_like(residual, dtype=torch.bfloat16)
    block = triton.next_power_of_2(width)
    _add_norm_kernel[(count,)](
        residual,
        delta,
        weight,
        out,
        width,
        eps,
        HAS_DELTA=delta is not None,
        BLOCK=block,
        num_warps=8,
    )
    return residual, out


@triton.jit
def _silu_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + row * width + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside
    )


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """See naive.silu_multiply."""
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(count, width, dtype=gate_up.dtype, device=gate_up.device)
    _silu_kernel[(count, triton.cdiv(width, 4096))](gate_up, out, width, BLOCK=4096, num_warps=8)
    return out


@triton.jit
def _partial_greedy_kernel(logits, top, top_id, total, width, chunks, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    gdc_launch_dependents()
    gdc_wait()
    x = tl.load(logits + row.to(tl.int64) * width + at, mask=at < width, other=float("-inf"))
    most = tl.max(x, 0)
    tl.store(top + row * chunks + chunk, most)
    tl.store(top_id + row * chunks + chunk, tl.min(tl.where(x == most, at, width), 0))
    tl.store(total + row * chunks + chunk, tl.sum(tl.exp(x - most), 0))


@triton.jit
def _greedy_kernel(top, top_id, total, tokens, logprobs, width, chunks, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    gdc_wait()
    tops = tl.load(top + row * chunks + at, mask=at < chunks, other=float("-inf"))
    ids = tl.load(top_id + row * chunks + at, mask=at < chunks, other=width)
    sums = tl.load(total + row * chunks + at, mask=at < chunks, other=0.0)
    most = tl.max(tops, 0)
    token = tl.minimum(
        tl.min(tl.where(tops == most, ids, width), 0), width - 1
    )  # not a number: any id
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, -tl.log(tl.sum(sums * tl.exp(tops - most), 0)))


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See naive.greedy."""
    rows, width = logits.shape
    chunks = triton.cdiv(width, CHUNK)
    top = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    top_id, total = torch.empty_like(top, dtype=torch.int32), torch.empty_like(top)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _partial_greedy_kernel[(rows, chunks)](
        logits, top, top_id, total, width, chunks, CHUNK=CHUNK, num_warps=8, launch_pdl=True
    )
    block = triton.next_power_of_2(chunks)
    _greedy_kernel[(rows,)](
        top,
        top_id,
        total,
        tokens,
        logprobs,
        width,
        chunks,
        BLOCK=block,
        num_warps=1,
        launch_pdl=True,
    )
    return tokens, logprobs

"""Triton kernels that work row by row: embedding rows, norms, SiLU."""

import torch
import triton
import triton.language as tl

SLOT = tl.constexpr(16)


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
    squares = torch.empty(count, width // SLOT.value, dtype=torch.float32, device=source.device)
    slots = triton.next_power_of_2(width // SLOT.value)
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

"""Products of at most 32 tokens with a weight matrix: shapes of skinny.cu, and launches."""

import functools
from dataclasses import asdict, dataclass, replace

import torch

from .cuda import CudaKernel

SCALE, RESIDUAL, SILU = 0, 1, 2
SLOT = 32  # columns behind one sum of squares


@dataclass(frozen=True)
class Shape:
    """Compile-time names of skinny.cu."""

    rows: int
    bk: int
    stages: int
    wr: int
    wk: int
    cluster: int = 1
    passes: int = 1
    lead: int = 4
    shift: int = 1


# By operator, then by the most tokens a shape is for; chosen by measurement (README.md).
SHAPES = {
    "qkv": {
        4: Shape(48, 512, 4, 3, 4),
        8: Shape(48, 256, 6, 3, 4),
        16: Shape(96, 128, 4, 3, 4, cluster=2),
        32: Shape(48, 256, 3, 3, 4),
    },
    "gate_up": {
        4: Shape(32, 512, 6, 2, 4, passes=6),
        8: Shape(96, 128, 3, 3, 4),
        16: Shape(96, 128, 3, 3, 4),
        32: Shape(192, 128, 3, 6, 2),
    },
    "residual": {
        4: Shape(32, 512, 6, 2, 8),
        8: Shape(32, 512, 5, 2, 8),
        16: Shape(32, 512, 4, 2, 8),
        32: Shape(64, 256, 4, 2, 4, cluster=2),
    },
    "head": {
        4: Shape(48, 256, 4, 3, 4),
        8: Shape(48, 256, 4, 3, 4),
        16: Shape(48, 256, 3, 3, 4),
        32: Shape(96, 128, 3, 3, 4),
    },
}


def _shape(operator: str, tokens: int, k: int) -> Shape:
    """The measured shape; shorter stages for a k that they do not divide."""
    shape = next(shape for most, shape in SHAPES[operator].items() if tokens <= most)
    bk = shape.bk
    while k % (bk * shape.cluster):
        bk //= 2
    return replace(shape, bk=bk)


@functools.cache
def _kernel(mode: int, k: int, tokens: int, shape: Shape) -> CudaKernel:
    defines = {name.upper(): value for name, value in asdict(shape).items()}
    shared = shape.stages * (shape.rows + tokens) * shape.bk * 2
    if shape.passes > 1:
        shared += shape.wk * max(8, tokens) * (shape.rows + 4) * 4
    defines |= {"MODE": mode, "K": k, "TOKENS": tokens}
    return CudaKernel(
        "skinny.cu", "skinny", defines, 32 * shape.wr * shape.wk, shared, shape.cluster
    )


def _launch(mode: int, operator: str, weight: torch.Tensor, tokens: int, *arguments) -> None:
    rows, k = weight.shape
    shape = _shape(operator, tokens, k)
    blocks = -(-rows // (shape.rows * shape.passes)) * shape.cluster
    padded = 1 << (tokens - 1).bit_length()
    n_out = rows // 2 if mode == SILU else rows
    *pointers, eps = arguments
    _kernel(mode, k, padded, shape)((blocks, 1, 1), weight, *pointers, tokens, n_out, eps)


def scaled_product(
    x: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See naive.scaled_product."""
    tokens, n = x.shape[0], weight.shape[0]
    out = torch.empty(tokens, n, dtype=torch.float32, device=x.device)
    operator = "head" if n >= 4 * x.shape[1] else "qkv"
    _launch(SCALE, operator, weight, tokens, x, squares, None, None, None, None, out, eps)
    return out


def residual_product(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See naive.residual_product."""
    tokens, n = residual.shape
    new, weighted = torch.empty_like(residual), torch.empty_like(residual, dtype=torch.bfloat16)
    squares = torch.empty(tokens, n // SLOT, dtype=torch.float32, device=x.device)
    results = (new, norm_weight, squares, weighted)
    _launch(RESIDUAL, "residual", weight, tokens, x, None, residual, *results, 0.0)
    return new, weighted, squares


def gate_up_product(
    x: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See naive.gate_up_product."""
    tokens, n = x.shape[0], weight.shape[0] // 2
    out = torch.empty(tokens, n, dtype=torch.bfloat16, device=x.device)
    _launch(SILU, "gate_up", weight, tokens, x, squares, None, None, None, None, out, eps)
    return out

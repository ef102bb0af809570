"""Products of at most 32 tokens with a weight matrix: shapes of skinny.cu for each operator, and launches."""

import functools
from dataclasses import asdict, dataclass, replace

import torch

from .cuda import CudaKernel

SCALE, RESIDUAL, SILU = 0, 1, 2
GEMV, MIN_BLOCKS = True, 3
SLOT = 8  # columns behind one sum of squares


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
    lead: int = 0


# By operator, then by groups of 8 tokens; chosen by measurement (README.md).
SHAPES = {
    "qkv": {
        1: Shape(48, 256, 4, 3, 4, lead=2),
        2: Shape(96, 128, 3, 3, 4, cluster=2, lead=2),
        4: Shape(96, 128, 3, 3, 4, cluster=2, lead=2),
    },
    "gate_up": {
        1: Shape(32, 512, 3, 2, 4, passes=6, lead=2),
        2: Shape(96, 128, 3, 3, 4, lead=2),
        4: Shape(96, 128, 3, 3, 4, lead=2),
    },
    "output": {
        1: Shape(32, 512, 3, 2, 4, lead=2),
        2: Shape(64, 128, 4, 2, 4, cluster=2, lead=2),
        4: Shape(64, 128, 4, 2, 4, cluster=2, lead=2),
    },
    "down": {
        1: Shape(32, 512, 3, 2, 4, lead=2),
        2: Shape(64, 128, 4, 2, 4, cluster=2, lead=2),
        4: Shape(64, 128, 4, 2, 4, cluster=2, lead=2),
    },
    "head": {1: Shape(48, 256, 4, 3, 4), 2: Shape(48, 256, 3, 3, 4), 4: Shape(96, 128, 3, 3, 4)},
}


@functools.cache
def _kernel(mode: int, k: int, tokens: int, shape: Shape) -> CudaKernel:
    defines = {name.upper(): value for name, value in asdict(shape).items()}
    shared = shape.stages * (shape.rows + tokens) * shape.bk * 2
    if shape.passes > 1:
        shared += shape.wk * max(8, tokens) * (shape.rows + 4) * 4
    defines |= {"MODE": mode, "K": k, "TOKENS": tokens}
    return CudaKernel("skinny.cu", "skinny", defines, 32 * shape.wr * shape.wk, shared, shape.cluster)


def _padded(tokens: int) -> int:
    return 1 << (tokens - 1).bit_length()


def _fitted(shape: Shape, k: int) -> Shape:
    """Shorter stages for a k that the measured ones do not divide."""
    bk = shape.bk
    while k % (bk * shape.cluster):
        bk //= 2
    return replace(shape, bk=bk)


def launch(mode: int, shape: Shape, n: int, k: int, tokens: int, *arguments) -> None:
    """`n` rows of the weight matrix, the gate and up of MODE_SILU counted apart."""
    if tokens == 1 and GEMV:
        *pointers, _, n_out, eps = arguments
        return _gemv(mode, k)((-(-n // 8), 1, 1), *pointers, n_out, eps)
    blocks = -(-n // (shape.rows * shape.passes)) * shape.cluster
    _kernel(mode, k, _padded(tokens), _fitted(shape, k))((blocks, 1, 1), *arguments)


def _shape(operator: str, tokens: int) -> Shape:
    return SHAPES[operator][max(1, _padded(tokens) // 8)]


@functools.cache
def _gemv(mode: int, k: int) -> CudaKernel:
    return CudaKernel("gemv.cu", "gemv", {"MODE": mode, "K": k, "MIN_BLOCKS": MIN_BLOCKS if k <= 4096 else 2}, 256, 0, 1)


def _empty(like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def scaled_product(
    x: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See naive.scaled_product."""
    (tokens, k), n = x.shape, weight.shape[0]
    out = _empty(x, (tokens, n), torch.float32)
    shape = _shape("head" if n >= 4 * k else "qkv", tokens)
    launch(SCALE, shape, n, k, tokens, weight, x, squares, None, None, None, None, out, tokens, n, eps)
    return out


def residual_product(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See naive.residual_product."""
    (tokens, k), n = x.shape, weight.shape[0]
    new, weighted = torch.empty_like(residual), torch.empty_like(residual, dtype=torch.bfloat16)
    squares = _empty(x, (tokens, n // SLOT), torch.float32)
    out = (residual, new, norm_weight, squares, weighted, tokens, n, 0.0)
    launch(RESIDUAL, _shape("down" if k > n else "output", tokens), n, k, tokens, weight, x, None, *out)
    return new, weighted, squares


def gate_up_product(
    x: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See naive.gate_up_product."""
    (tokens, k), rows = x.shape, weight.shape[0]
    out = _empty(x, (tokens, rows // 2), torch.bfloat16)
    arguments = (weight, x, squares, None, None, None, None, out, tokens, rows // 2, eps)
    launch(SILU, _shape("gate_up", tokens), rows, k, tokens, *arguments)
    return out

"""Products of at most 32 tokens with a weight matrix: shapes of skinny.cu for each operator, and their launches."""

import functools

import torch

from .cuda import CudaKernel

SCALE, RESIDUAL, SILU = 0, 1, 2
SLOT = 32  # columns behind one sum of squares
MAX_TOKENS = 32


@functools.cache
def _kernel(mode: int, k: int, rows: int, cluster: int, groups: int, bk: int, stages: int, wr: int, wk: int):
    shape = dict(K=k, ROWS=rows, CLUSTER=cluster, NT=groups, BK=bk, STAGES=stages, WR=wr, WK=wk)
    shared = stages * (rows + groups * 8) * bk * 2
    return CudaKernel("skinny.cu", "skinny", shape | {"MODE": mode}, 32 * wr * wk, shared, cluster)


def _token_groups(tokens: int) -> int:
    return 1 if tokens <= 8 else 2 if tokens <= 16 else 4


def _wide(mode: int, k: int, tokens: int):
    """192 rows a block: for matrices with rows enough for every multiprocessor."""
    return _kernel(mode, k, 192, 1, _token_groups(tokens), 64, 4, 12, 1), 192


def _shared(mode: int, k: int, rows: int, tokens: int):
    """Four blocks share `rows` rows and split k, so that each reads a quarter of the tokens' values."""
    return _kernel(mode, k, rows, 4, _token_groups(tokens), 64, 5 if rows == 128 else 4, rows // 16, 1), rows // 4


def _blocks(n: int, rows: int, cluster: int = 1) -> tuple[int, int, int]:
    return (-(-n // (rows * cluster)) * cluster, 1, 1)


def _empty(like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def scaled_product(x: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See naive.scaled_product."""
    (tokens, k), n = x.shape, weight.shape[0]
    out = _empty(x, (tokens, n), torch.float32)
    if n >= 4 * k:
        (kernel, rows), cluster = _wide(SCALE, k, tokens), 1
    else:
        (kernel, rows), cluster = _shared(SCALE, k, 192, tokens), 4
    kernel(_blocks(n, rows, cluster), weight, x, squares, None, None, None, None, out, tokens, n, eps)
    return out


def residual_product(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See naive.residual_product."""
    (tokens, k), n = x.shape, weight.shape[0]
    new, weighted = torch.empty_like(residual), torch.empty_like(residual, dtype=torch.bfloat16)
    squares = _empty(x, (tokens, n // SLOT), torch.float32)
    kernel, rows = _shared(RESIDUAL, k, 128, tokens)
    grid = _blocks(n, rows, 4)
    kernel(grid, weight, x, None, residual, new, norm_weight, squares, weighted, tokens, n, 0.0)
    return new, weighted, squares


def gate_up_product(x: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See naive.gate_up_product."""
    (tokens, k), n = x.shape, weight.shape[0] // 2
    out = _empty(x, (tokens, n), torch.bfloat16)
    kernel, rows = _wide(SILU, k, tokens)
    kernel(_blocks(n, rows // 2), weight, x, squares, None, None, None, None, out, tokens, n, eps)
    return out

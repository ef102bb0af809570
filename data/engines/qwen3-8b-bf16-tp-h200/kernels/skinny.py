"""Products of at most 32 tokens with a weight matrix: shapes of skinny.cu, and launches."""

import functools
from dataclasses import asdict, dataclass, replace

import torch

from ..group import Group
from ..naive import ALONE
from .cuda import CudaKernel
from .exchange import arguments

SCALE, RESIDUAL, SILU = 0, 1, 2
SLOT = 16  # columns behind one sum of squares


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

    def shared_bytes(self, tokens: int) -> int:
        """Of a block: the ring and, where tiles follow each other, the sums beside it."""
        sums = self.wk * max(8, tokens) * (self.rows + 4) * 4
        ring = self.stages * (self.rows + tokens) * self.bk * 2
        return ring + sums if self.passes > 1 else ring


SMS = 132  # an H200's multiprocessors

# By operator, then by the most tokens a shape is for; README.md says what was measured. Rings of
# 200 KB, one block on a multiprocessor, or of 100 KB, two.
SHAPES = {
    "qkv": {
        4: Shape(16, 512, 6, 1, 8),
        8: Shape(32, 512, 5, 2, 4),
        16: Shape(32, 256, 6, 2, 4),
        32: Shape(48, 256, 4, 3, 4, cluster=2),
    },
    "gate_up": {
        1: Shape(16, 512, 6, 1, 8),
        8: Shape(96, 256, 4, 3, 4),
        16: Shape(96, 256, 3, 3, 4),
        32: Shape(96, 256, 3, 3, 4),
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


def _shape(operator: str, tokens: int, rows: int, k: int) -> Shape:
    """A measured shape, fitted to the rows and k of one rank."""
    shape = next(shape for most, shape in SHAPES[operator].items() if tokens <= most)
    tiles = -(-rows // shape.rows)
    if operator == "gate_up" and tokens == 1:  # many tiles: a block takes several in turn
        shape = replace(shape, passes=-(-tiles // (2 * SMS)))
    elif operator in ("qkv", "gate_up") and 2 * tiles * shape.cluster <= SMS:  # few: smaller ones
        if shape.cluster > 1:  # a tiny model's k is no work for so many
            more = 2 if k % (256 * shape.cluster) == 0 else 1
            shape = replace(shape, cluster=more * shape.cluster)
        else:
            halves = {"rows": shape.rows // 2, "wr": min(shape.wr, shape.rows // 32)}
            shape = replace(shape, **halves) if halves["wr"] else shape  # a warp's tile is 16 rows
    bk = shape.bk
    while k % (bk * shape.cluster):
        bk //= 2
    stages = min(shape.stages, k // (bk * shape.cluster)) if shape.passes == 1 else shape.stages
    sums = shape.wk * max(8, tokens) * (shape.rows + 4) * 4  # at the end they lie in the ring
    least = -(-sums // ((shape.rows + tokens) * bk * 2)) if shape.passes == 1 else 2
    return replace(shape, bk=bk, stages=max(2, stages, least))


@functools.cache
def _kernel(mode: int, world: int, k: int, tokens: int, shape: Shape) -> CudaKernel:
    defines = {name.upper(): value for name, value in asdict(shape).items()}
    defines |= {"MODE": mode, "WORLD": world, "K": k, "TOKENS": tokens}
    threads, shared = 32 * shape.wr * shape.wk, shape.shared_bytes(tokens)
    return CudaKernel("skinny.cu", "skinny", defines, threads, shared, shape.cluster)


def _launch(
    mode: int,
    operator: str,
    weight: torch.Tensor,
    tokens: int,
    *pointers,
    exchange: tuple = arguments(ALONE),
    world: int = 1,
) -> None:
    rows, k = weight.shape
    shape = _shape(operator, tokens, rows, k)
    blocks = -(-rows // (shape.rows * shape.passes)) * shape.cluster
    padded = 1 << (tokens - 1).bit_length()
    n_out = rows // 2 if mode == SILU else rows
    *pointers, eps = pointers
    sizes = (tokens, n_out, eps, *exchange)
    _kernel(mode, world, k, padded, shape)((blocks, 1, 1), weight, *pointers, *sizes)


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
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    group: Group = ALONE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See naive.residual_product."""
    tokens, n = residual.shape
    new, weighted = torch.empty_like(residual), torch.empty_like(residual, dtype=torch.bfloat16)
    squares = torch.empty(tokens, n // SLOT, dtype=torch.float32, device=x.device)
    results = (new, norm_weight, squares, weighted)
    group_options = {"exchange": arguments(group), "world": group.world}
    _launch(RESIDUAL, "residual", weight, tokens, x, None, residual, *results, 0.0, **group_options)
    return new, weighted, squares


def gate_up_product(
    x: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See naive.gate_up_product."""
    tokens, n = x.shape[0], weight.shape[0] // 2
    out = torch.empty(tokens, n, dtype=torch.bfloat16, device=x.device)
    _launch(SILU, "gate_up", weight, tokens, x, squares, None, None, None, None, out, eps)
    return out

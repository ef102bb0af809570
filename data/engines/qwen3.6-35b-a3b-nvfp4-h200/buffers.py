"""Sizes that host and kernels share, and the memory between the kernels of a step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import PAGE, Cache
from .config import Config
from .formats import Matrix

MAX_ROWS = 32
PICK_BLOCKS = 64
TILE = 16
# Row tiles of a block in the batched products and blocks along K of the output projection; the
# kernels are compiled for them.
BLOCK_TILES = {"IN_TILES": 6, "QKV_TILES": 5, "OUT_TILES": 4, "ROUTER_TILES": 1}
OUT_PARTS = 4
# Shared memory of the kernels: columns and padded stride of a staged activation block, stages.
X_COLUMNS, X_STRIDE, STAGES = 256, 272, 3
GROUP_BYTES = 1152  # 16 rows x 128 columns of NVFP4
MAX_SPLIT_ROWS = 128  # attention splits x rows
ATTENTION_SHARED = 2 * 2 * 32 * (256 + 8) * 2  # stages, keys and values, tokens, padded rows
# The resident kernel of one row: sixteen warps and a producer; shared memory; stages of its ring,
# and how many of them are on their way at a time.
PERSISTENT_THREADS, PERSISTENT_SHARED = 17 * 32, 216064
RING_STAGES, IN_FLIGHT = 12, 3
MOE_THREADS = (16 + 4) * 32  # warps that multiply, and that ask for weights and activations
# Rows of a prompt that share an expert's decoded weights; shared memory of that product.
PROMPT_UNIT = 48
PROMPT_SHARED = 4 * 16 * 2 * GROUP_BYTES + 2 * PROMPT_UNIT * X_STRIDE * 2
MOE_SHARED = 4 * (8 * 4 * GROUP_BYTES + 2 * 8 * X_STRIDE * 2)  # stages of 8 tiles, 8 rows


def defines(config: Config) -> dict[str, int]:
    """Sizes for the compiler; ValueError names a size that the kernels cannot serve."""
    need = {
        "head_dim": config.head_dim == 256,
        "linear_key_head_dim": config.key_dim == 128,
        "linear_value_head_dim": config.value_dim == 128,
        "num_experts_per_tok": config.top_k == 8,
        "num_experts": config.experts == 256,
        "shared_expert_intermediate_size": config.shared_width == config.expert_width,
        "hidden_size": config.hidden % 2048 == 0,
        "moe_intermediate_size": config.expert_width == 512,
        "vocab_size": config.vocab % 64 == 0,
        "num_attention_heads": config.attention_width == config.value_width
        and config.heads // config.kv_heads == 8,
    }
    for name, good in need.items():
        if not good:
            raise ValueError(f"config.json: {name} has no CUDA kernel; run on device cpu")
    sizes = {
        "HIDDEN": config.hidden,
        "WIDTH": config.expert_width,
        "EXPERTS": config.experts,
        "TOP_K": config.top_k,
        "VOCAB": config.vocab,
        "KEY_HEADS": config.key_heads,
        "VALUE_HEADS": config.value_heads,
        "KEY_DIM": config.key_dim,
        "VALUE_DIM": config.value_dim,
        "VALUE_WIDTH": config.value_width,
        "CONV_WIDTH": config.conv_width,
        "HEADS": config.heads,
        "KV_HEADS": config.kv_heads,
        "HEAD_DIM": config.head_dim,
        "ROPE_DIM": config.rope_dim,
    }
    resident = {
        "RING_STAGES": RING_STAGES,
        "IN_FLIGHT": IN_FLIGHT,
        "PERSISTENT_SHARED": PERSISTENT_SHARED,
    }
    return sizes | BLOCK_TILES | {"OUT_PARTS": OUT_PARTS, "PROMPT_UNIT": PROMPT_UNIT} | resident


class Buffers:
    """Memory between the kernels of a step, shared by all steps: they never run side by side."""

    def __init__(self, config: Config, device: torch.device) -> None:
        r = MAX_ROWS
        make = lambda *shape, dtype=torch.float32: torch.zeros(  # noqa: E731
            shape, dtype=dtype, device=device
        )
        self.ld = max(config.conv_width + config.value_width, config.qkv_width)
        self.ld_ab = -(-2 * config.value_heads // TILE) * TILE
        self.ld_router = (config.experts + TILE) // TILE * TILE
        self.x = make(r, config.hidden)
        self.xn = make(config.hidden // X_COLUMNS, r, X_STRIDE, dtype=torch.float16)
        self.sums = make(OUT_PARTS, r, config.hidden)
        self.y, self.ab = make(r, self.ld), make(r, self.ld_ab)
        self.o = make(1, config.value_width)
        self.mixed = make(config.value_width // X_COLUMNS, r, X_STRIDE, dtype=torch.float16)
        self.router = make(r, self.ld_router)
        per_token = config.top_k + 1
        self.h = make(r * per_token, config.expert_width, dtype=torch.float16)
        self.parts = make(r * per_token, config.hidden)
        self.weights = make(r, per_token)
        self.units = make(1 + 3 * config.experts, dtype=torch.int32)
        self.members = make(r * config.top_k, dtype=torch.int32)
        self.touched = make(1, dtype=torch.int32)
        self.attention = make(MAX_SPLIT_ROWS, config.heads, config.head_dim)
        self.stats = make(MAX_SPLIT_ROWS, config.heads, 2)
        self.logits = make(r, config.vocab)
        self.pick = make(r, PICK_BLOCKS, 4)
        self.out = make(2, r, dtype=torch.int32)  # tokens; bits of the log probabilities
        self.row_slot = make(r, dtype=torch.int32)


def tile_bytes(matrix: Matrix) -> int:
    """Bytes of a packed row tile, scales included."""
    per_column = {"nvfp4": 9, "fp8": 16, "f16": 32}[matrix.kind]
    return per_column * matrix.cols


def splits_for(rows: int, pages: int) -> int:
    """Splits of a sequence: enough blocks for the GPU, no more than half pages."""
    return max(1, min(2 * pages, 64, MAX_SPLIT_ROWS // rows))


@dataclass
class SlotState:
    """Per-slot device state that kernels read and advance."""

    token: Tensor
    position: Tensor
    temperature: Tensor
    seed: Tensor


def rope_table(config: Config, positions: int, device: torch.device) -> Tensor:
    """Cosines and sines [positions, rope_dim / 2, 2], angles formed in float64."""
    half = torch.arange(0, config.rope_dim, 2, dtype=torch.float64) / config.rope_dim
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * config.rope_theta**-half
    return torch.stack((angle.cos(), angle.sin()), -1).float().to(device)


def context_positions(cache: Cache) -> int:
    """Positions a slot can hold."""
    return cache.pages_per_slot * PAGE

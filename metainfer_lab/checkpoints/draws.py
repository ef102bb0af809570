"""Random weights by a tensor's name: the Qwen3.5/3.6 hybrid, tiny and full-size, and dense models.

Not degenerate, so that a fault shows: attention looks somewhere, gates are neither open nor shut,
beta and the decay of a head take their whole range, norm weights differ from their neutral value,
and experts win by what a token is rather than by what all tokens share.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from metainfer_lab.model import ModelDims

if TYPE_CHECKING:
    import torch

LOGIT_STD = 3.0  # of an untrained head's logits: wide enough for greedy choices to mean something
DECAY = (0.2, 0.999)  # of a head's state in one step, from the most forgetful head to the least
NORM_STD = 0.3

# Standard deviation of (weight · sqrt(inputs)), by the end of a tensor's name. Inputs have unit
# size after a norm; what comes out of a gate is smaller, and what adds to the residual is scaled
# by `residual` besides.
SPREAD = {
    "q_proj": 1.4,
    "k_proj": 1.2,
    "v_proj": 1.2,
    "in_proj_qkv": 1.2,
    "in_proj_z": 1.2,
    "in_proj_a": 1.0,
    "in_proj_b": 1.5,
    "gate_up_proj": 1.2,
    "gate_proj": 1.2,
    "up_proj": 1.2,
    "mlp.gate": 1.4,
    "shared_expert_gate": 1.5,
}
RESIDUAL_SPREAD = {"o_proj": 5.0, "out_proj": 2.5, "down_proj": 3.5}
QUERY_KEY_CORRELATION = 0.7  # in Gated DeltaNet; without it a token's output is small differences


def draw(
    name: str,
    shape: tuple[int, ...],
    dims: ModelDims,
    generator: torch.Generator,
    residual: float,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """float32 weights of one tensor of the text model, or of what stands beside it.

    residual: size of a block's output, in units of the embedding's.
    """
    import torch

    noise = torch.randn(shape, generator=generator, device=device)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")) and dims.gdn is not None:
        correlate(noise, dims.gdn.num_key_heads * dims.gdn.key_head_dim)
    if name.endswith("A_log"):
        return log_decay_rates(noise)
    if name.endswith("dt_bias"):
        return 0.5 * noise
    if "norm" in name:  # the hybrid stores the difference from 1, but for that of GDN's output
        centred = dims.family == "qwen3_5_moe" and "linear_attn.norm" not in name
        return NORM_STD * noise + (0.0 if centred else 1.0)
    if name.endswith("conv1d.weight"):
        return 0.6 * noise
    if name.endswith("mlp.gate.weight"):  # rows of equal length: no expert is a favourite
        noise *= math.sqrt(shape[-1]) / noise.norm(dim=-1, keepdim=True)
    return spread(name, shape, dims, residual) * noise


def correlate(noise: torch.Tensor, rows: int) -> None:
    """Make the first `rows` rows (queries) resemble the next ones (keys), in place."""
    own = math.sqrt(1 - QUERY_KEY_CORRELATION**2)
    noise[:rows] = QUERY_KEY_CORRELATION * noise[rows : 2 * rows] + own * noise[:rows]


def residual_share(blocks: int) -> float:
    """Size of a block's output at which all of them together are as large at any depth."""
    return 0.7 / math.sqrt(blocks)


def spread(name: str, shape: tuple[int, ...], dims: ModelDims, residual: float) -> float:
    """Standard deviation of a matrix's weights, by its module's name."""
    module = name.removesuffix(".weight")
    if module.endswith(("embed_tokens", "lm_head")):
        return LOGIT_STD / math.sqrt(dims.hidden_size)
    inputs = shape[-1]
    for end, size in RESIDUAL_SPREAD.items():
        if module.endswith(end):
            return size * residual * LOGIT_STD / math.sqrt(dims.hidden_size * inputs)
    for end, size in SPREAD.items():
        if module.endswith(end):
            return size / math.sqrt(inputs)
    return 1 / math.sqrt(inputs)  # vision and multi-token prediction, which no text engine reads


def log_decay_rates(noise: torch.Tensor) -> torch.Tensor:
    """A_log [heads]: decays exp(-exp(A_log) softplus(·)) spread evenly in the log of their rate.

    The softplus is about 0.7; heads get their rates in random order (that of `noise`).
    """
    import torch

    fastest, slowest = (math.log(-math.log(decay) / 0.7) for decay in DECAY)
    heads = noise.shape[0]
    order = noise.argsort().argsort().float()
    jitter = 0.2 * torch.tanh(noise)
    return slowest + (fastest - slowest) * ((order + 0.5 + jitter) / heads)


def draw_dims(
    rng: np.random.Generator, granules: dict[str, int], *, quantised: bool = False, **fixed: Any
) -> dict[str, Any]:
    """Text fields of a small config.json, each a multiple of its granule; `fixed` overrides.

    They are never those of a model that ships (which have 8 or 256 experts), and several heads
    share a key head, of which there are several.
    """

    def multiple(name: str, low: int, high: int, of: int = 1) -> int:
        granule = math.lcm(granules.get(name, 1), of)
        return granule * int(rng.integers(max(1, -(-low // granule)), max(1, high // granule) + 1))

    block = 16 if quantised else 1
    kv_heads = multiple("num_key_value_heads", 2, 2)
    key_heads = multiple("linear_num_key_heads", 2, 3)
    drawn = {
        "hidden_size": multiple("hidden_size", 48, 96, of=block),
        "num_hidden_layers": 4,
        "num_attention_heads": multiple(
            "num_attention_heads", 2 * kv_heads, 3 * kv_heads, of=kv_heads
        ),
        "num_key_value_heads": kv_heads,
        "head_dim": multiple("head_dim", 16, 32, of=8),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": multiple(
            "linear_num_value_heads", 2 * key_heads, 3 * key_heads, of=key_heads
        ),
        "linear_key_head_dim": multiple("linear_key_head_dim", 12, 24),
        "linear_value_head_dim": multiple("linear_value_head_dim", 12, 24),
        "linear_conv_kernel_dim": 4,
        "num_experts": multiple("num_experts", 10, 20),
        "num_experts_per_tok": int(rng.integers(2, 5)),
        "moe_intermediate_size": multiple("moe_intermediate_size", 16, 40, of=block),
        "shared_expert_intermediate_size": multiple(
            "shared_expert_intermediate_size", 16, 48, of=block
        ),
        "vocab_size": multiple("vocab_size", 150, 260),
        "max_position_embeddings": int(rng.integers(300, 400)),
        "rope_theta": float(rng.choice([1e4, 1e6, 1e7])),
        "rms_norm_eps": float(rng.choice([1e-5, 1e-4, 1e-3])),
    }
    return drawn | fixed

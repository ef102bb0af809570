"""The model's weights: which tensors a config asks for, and how they are fused on loading."""

from dataclasses import dataclass
from pathlib import Path

import torch

from .checkpoint import Checkpoint, open_checkpoint
from .config import LINEAR, Config


@dataclass(frozen=True)
class LinearAttention:
    """Gated DeltaNet: in_proj [C + H*Dv + 2H, E] gives q k v, z, b, a, one after another."""

    in_proj: torch.Tensor
    conv: torch.Tensor  # [C, W]
    a_log: torch.Tensor  # [H]
    dt_bias: torch.Tensor  # [H]
    norm: torch.Tensor  # [Dv]
    out_proj: torch.Tensor  # [E, H*Dv]


@dataclass(frozen=True)
class FullAttention:
    """Gated attention: in_proj [(2N + 2K)*D, E] gives q, k, v, gate, one after another."""

    in_proj: torch.Tensor
    qk_norm: torch.Tensor  # [N + K, D], one row per head
    out_proj: torch.Tensor  # [E, N*D]


@dataclass(frozen=True)
class Experts:
    """in_proj [X + 1 + 2S, E] gives router logits, the shared expert's gate, its gate and up."""

    in_proj: torch.Tensor
    gate_up: torch.Tensor  # [X, 2F, E]
    down: torch.Tensor  # [X, E, F]
    shared_down: torch.Tensor  # [E, S]


@dataclass(frozen=True)
class Layer:
    """One decoder layer; its norms [E] are differences from one."""

    input_norm: torch.Tensor
    mixer: LinearAttention | FullAttention
    post_norm: torch.Tensor
    experts: Experts


@dataclass(frozen=True)
class Weights:
    """All weights in float32; head is embed when the two are tied."""

    embed: torch.Tensor  # [V, E]
    layers: tuple[Layer, ...]
    norm: torch.Tensor  # [E]
    head: torch.Tensor  # [V, E]


def load_weights(folder: Path, config: Config) -> Weights:
    """Read and fuse every tensor of a checkpoint; ValueError names what is at fault."""
    with open_checkpoint(folder, config, expected_tensors(config)) as files:
        top = config.prefix
        embed = files.read(f"{top}embed_tokens.weight")
        return Weights(
            embed=embed,
            layers=tuple(_layer(files, config, i) for i in range(config.num_hidden_layers)),
            norm=files.read(f"{top}norm.weight"),
            head=embed if config.tie_word_embeddings else files.read("lm_head.weight"),
        )


def expected_tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each tensor that the checkpoint must hold."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes = {
        f"{config.prefix}embed_tokens.weight": (vocab, hidden),
        f"{config.prefix}norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i, kind in enumerate(config.layer_types):
        mixer = _linear_shapes(config) if kind == LINEAR else _full_shapes(config)
        for name, shape in (mixer | _common_shapes(config)).items():
            shapes[f"{config.prefix}layers.{i}.{name}"] = shape
    return shapes


def _linear_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    return {
        "linear_attn.in_proj_qkv.weight": (config.conv_width, hidden),
        "linear_attn.in_proj_z.weight": (config.value_width, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (config.conv_width, 1, config.linear_conv_kernel_dim),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (config.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (hidden, config.value_width),
    }


def _full_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    hidden, width = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
    return {
        "self_attn.q_proj.weight": (2 * queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (width,),
        "self_attn.k_norm.weight": (width,),
    }


def _common_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    hidden, experts = config.hidden_size, config.num_experts
    ffn, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj": (experts, 2 * ffn, hidden),
        "mlp.experts.down_proj": (experts, hidden, ffn),
        "mlp.shared_expert.gate_proj.weight": (shared, hidden),
        "mlp.shared_expert.up_proj.weight": (shared, hidden),
        "mlp.shared_expert.down_proj.weight": (hidden, shared),
        "mlp.shared_expert_gate.weight": (1, hidden),
    }


def _layer(files: Checkpoint, config: Config, i: int) -> Layer:
    top = f"{config.prefix}layers.{i}."
    linear = config.layer_types[i] == LINEAR
    return Layer(
        input_norm=files.read(f"{top}input_layernorm.weight"),
        mixer=_linear(files, top) if linear else _full(files, top, config),
        post_norm=files.read(f"{top}post_attention_layernorm.weight"),
        experts=_experts(files, f"{top}mlp."),
    )


def _linear(files: Checkpoint, top: str) -> LinearAttention:
    top = f"{top}linear_attn."
    parts = [files.read(f"{top}in_proj_{part}.weight") for part in ("qkv", "z", "b", "a")]
    return LinearAttention(
        in_proj=torch.cat(parts),
        conv=files.read(f"{top}conv1d.weight").squeeze(1),
        a_log=files.read(f"{top}A_log"),
        dt_bias=files.read(f"{top}dt_bias"),
        norm=files.read(f"{top}norm.weight"),
        out_proj=files.read(f"{top}out_proj.weight"),
    )


def _full(files: Checkpoint, top: str, config: Config) -> FullAttention:
    """Take q_proj, whose rows alternate head by head, apart, so that q and k lie side by side."""
    top = f"{top}self_attn."
    heads, kv_heads, width = (
        config.num_attention_heads, config.num_key_value_heads, config.head_dim
    )
    query, gate = files.read(f"{top}q_proj.weight").view(heads, 2, width, -1).unbind(1)
    key, value = files.read(f"{top}k_proj.weight"), files.read(f"{top}v_proj.weight")
    norms = [files.read(f"{top}q_norm.weight").expand(heads, width)]
    norms.append(files.read(f"{top}k_norm.weight").expand(kv_heads, width))
    return FullAttention(
        in_proj=torch.cat([query.flatten(0, 1), key, value, gate.flatten(0, 1)]),
        qk_norm=torch.cat(norms),
        out_proj=files.read(f"{top}o_proj.weight"),
    )


def _experts(files: Checkpoint, top: str) -> Experts:
    names = ("gate", "shared_expert_gate", "shared_expert.gate_proj", "shared_expert.up_proj")
    return Experts(
        in_proj=torch.cat([files.read(f"{top}{name}.weight") for name in names]),
        gate_up=files.read(f"{top}experts.gate_up_proj"),
        down=files.read(f"{top}experts.down_proj"),
        shared_down=files.read(f"{top}shared_expert.down_proj.weight"),
    )

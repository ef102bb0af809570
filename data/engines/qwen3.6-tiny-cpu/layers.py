"""Weights of the layers, fused for few products, read from a checkpoint."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .config import LINEAR, Config


@dataclass(frozen=True)
class LinearMixer:
    """A gated DeltaNet mixer."""

    in_proj: Tensor  # [C + H·Dv + 2·H, E]: qkv, z, b, a
    conv: Tensor  # [C, W]
    a_log: Tensor  # [H]
    dt_bias: Tensor  # [H]
    norm: Tensor  # [Dv], plain weight
    out_proj: Tensor  # [E, H·Dv]


@dataclass(frozen=True)
class FullMixer:
    """A gated attention mixer."""

    in_proj: Tensor  # [(N + 2·K + N)·D, E]: queries, keys, values, gates
    norm: Tensor  # [N + K, D]: 1 + weight, of each query and key head
    out_proj: Tensor  # [E, N·D]


@dataclass(frozen=True)
class Experts:
    """Router, routed experts and the shared expert."""

    in_proj: Tensor  # [X + 1 + 2·S, E]: router, the shared expert's gate, its gate and up rows
    gate_up: Tensor  # [X, 2·F, E]
    down: Tensor  # [X, E, F]
    shared_down: Tensor  # [E, S]


@dataclass(frozen=True)
class Layer:
    """One decoder layer; `index` counts the layers with its kind of mixer."""

    index: int
    input_norm: Tensor  # [E]: 1 + weight
    mixer: LinearMixer | FullMixer
    expert_norm: Tensor  # [E]: 1 + weight
    experts: Experts


def _linear_mixer(checkpoint: Checkpoint, at: str) -> LinearMixer:
    projections = [f"{at}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")]
    return LinearMixer(
        in_proj=checkpoint.rows(*projections),
        conv=checkpoint.text(f"{at}conv1d.weight").squeeze(1),
        a_log=checkpoint.text(f"{at}A_log"),
        dt_bias=checkpoint.text(f"{at}dt_bias"),
        norm=checkpoint.text(f"{at}norm.weight"),
        out_proj=checkpoint.text(f"{at}out_proj.weight"),
    )


def _full_mixer(checkpoint: Checkpoint, at: str, c: Config) -> FullMixer:
    # The rows of q_proj alternate head by head: D of the query, then D of its gate.
    alternating = checkpoint.text(f"{at}q_proj.weight")
    halves = alternating.view(c.num_attention_heads, 2, c.head_dim, c.hidden_size)
    query, gate = (half.flatten(0, 1) for half in halves.unbind(1))
    key_value = checkpoint.rows(f"{at}k_proj.weight", f"{at}v_proj.weight")
    norms = [(c.num_attention_heads, "q_norm"), (c.num_key_value_heads, "k_norm")]
    norm = [(1 + checkpoint.text(f"{at}{name}.weight")).expand(n, -1) for n, name in norms]
    return FullMixer(
        in_proj=torch.cat((query, key_value, gate)),
        norm=torch.cat(norm),
        out_proj=checkpoint.text(f"{at}o_proj.weight"),
    )


def _experts(checkpoint: Checkpoint, at: str) -> Experts:
    names = ("gate", "shared_expert_gate", "shared_expert.gate_proj", "shared_expert.up_proj")
    return Experts(
        in_proj=checkpoint.rows(*(f"{at}{name}.weight" for name in names)),
        gate_up=checkpoint.text(f"{at}experts.gate_up_proj"),
        down=checkpoint.text(f"{at}experts.down_proj"),
        shared_down=checkpoint.text(f"{at}shared_expert.down_proj.weight"),
    )


def read_layer(checkpoint: Checkpoint, config: Config, i: int) -> Layer:
    """Layer `i` of the model."""
    at, kind = f"layers.{i}.", config.layer_types[i]
    if kind == LINEAR:
        mixer = _linear_mixer(checkpoint, f"{at}linear_attn.")
    else:
        mixer = _full_mixer(checkpoint, f"{at}self_attn.", config)
    return Layer(
        index=config.layer_types[:i].count(kind),
        input_norm=1 + checkpoint.text(f"{at}input_layernorm.weight"),
        mixer=mixer,
        expert_norm=1 + checkpoint.text(f"{at}post_attention_layernorm.weight"),
        experts=_experts(checkpoint, f"{at}mlp."),
    )

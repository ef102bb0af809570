"""The model's weights in the form the forward pass wants: fused, norms folded in."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's four products; qkv and gate_up contain the norm before them.

    All are [in, out] views, as torch.mm wants them, of contiguous [out, in] matrices.
    """

    qkv: Tensor  # [E, (N + 2K) * D]
    out: Tensor  # [N * D, E]
    gate_up: Tensor  # [E, 2F]
    down: Tensor  # [F, E]


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights; head is the embedding itself when the config ties them."""

    embedding: Tensor  # [V, E]
    layers: list[LayerWeights]
    norm: Tensor  # [E], times sqrt(E)
    head: Tensor  # [E, V], a view like a layer's


def load_weights(checkpoint: Checkpoint, config: ModelConfig) -> Weights:
    """Read every tensor once; the peak above the result is a few tensors of one layer.

    Norms are folded into the columns of the product that follows, with the factor sqrt(E) that
    model.unit_rows leaves out. The last norm is kept apart: its product may be the embedding.
    """
    embedding = checkpoint.read("model.embed_tokens.weight")
    tied = config.tie_word_embeddings
    return Weights(
        embedding=embedding,
        layers=[_layer(checkpoint, config, i) for i in range(config.num_hidden_layers)],
        norm=checkpoint.read("model.norm.weight").mul_(math.sqrt(config.hidden_size)),
        head=(embedding if tied else checkpoint.read("lm_head.weight")).t(),
    )


def _layer(checkpoint: Checkpoint, config: ModelConfig, index: int) -> LayerWeights:
    def read(part: str) -> Tensor:
        return checkpoint.read(f"model.layers.{index}.{part}.weight")

    root = math.sqrt(config.hidden_size)
    query = _pair_rows(read("self_attn.q_proj"), config.head_dim)
    key = _pair_rows(read("self_attn.k_proj"), config.head_dim)
    qkv = torch.cat([query, key, read("self_attn.v_proj")])
    gate_up = torch.cat([read("mlp.gate_proj"), read("mlp.up_proj")])
    return LayerWeights(
        qkv=qkv.mul_(read("input_layernorm") * root).t(),
        out=read("self_attn.o_proj").t(),
        gate_up=gate_up.mul_(read("post_attention_layernorm") * root).t(),
        down=read("mlp.down_proj").t(),
    )


def _pair_rows(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows [H * D, E] of each head from halves (x1, x2) to pairs (x1[i], x2[i]).

    The half-split rotation is then one product of complex numbers. Queries and keys are
    reordered alike, which leaves their dot products as they were.
    """
    halves = weight.view(-1, 2, head_dim // 2, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)

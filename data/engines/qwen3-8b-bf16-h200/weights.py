"""Strict loader: every tensor of the checkpoint is used once, has the right shape and dtype, or is
refused by name.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .config import ModelConfig

UNUSED = ("rotary_emb.inv_freq",)  # known and recomputed


@dataclass
class Layer:
    input_norm: torch.Tensor  # [H]
    qkv: torch.Tensor  # [(heads + 2 kv heads) * D, H]: rows of query, key, value
    q_norm: torch.Tensor  # [D]
    k_norm: torch.Tensor  # [D]
    output: torch.Tensor  # [H, heads * D]
    post_norm: torch.Tensor  # [H]
    gate_up: torch.Tensor  # [2 I, H]: rows of gate, then up
    down: torch.Tensor  # [H, I]


@dataclass
class Weights:
    embedding: torch.Tensor  # [V, H]
    layers: list[Layer]
    norm: torch.Tensor  # [H]
    head: torch.Tensor  # [V, H]


def empty_weights(c: ModelConfig, device: str, dtype: torch.dtype) -> Weights:
    """Memory for all weights; tied ones share it."""

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    h, i, d, heads = c.hidden_size, c.intermediate_size, c.head_dim, c.num_attention_heads
    layers = [
        Layer(
            new(h),
            new(c.qkv_size, h),
            new(d),
            new(d),
            new(h, heads * d),
            new(h),
            new(2 * i, h),
            new(h, i),
        )
        for _ in range(c.num_hidden_layers)
    ]
    embedding = new(c.vocab_size, h)
    return Weights(
        embedding, layers, new(h), embedding if c.tie_word_embeddings else new(c.vocab_size, h)
    )


def load_weights(folder: Path, c: ModelConfig, device: str, dtype: torch.dtype) -> Weights:
    """Reads model.safetensors, or the shards of its index, into `dtype` on `device`.

    ValueError names a tensor that is missing, left over, twice there, or of the wrong shape or
    dtype.
    """
    weights = empty_weights(c, device, dtype)
    targets = dict(_targets(weights, c))
    allowed = {torch.bfloat16} if dtype == torch.bfloat16 else {torch.bfloat16, torch.float32}
    seen = set()
    for name, tensor in _tensors(folder):
        if name.endswith(UNUSED) or (c.tie_word_embeddings and name == "lm_head.weight"):
            continue
        if name not in targets:
            raise ValueError(
                f"{folder}: tensor {name} is left over, this model has no place for it"
            )
        if name in seen:
            raise ValueError(f"{folder}: tensor {name} is there twice")
        _copy(name, tensor, targets[name], allowed)
        seen.add(name)
    missing = sorted(targets.keys() - seen)
    if missing:
        raise ValueError(f"{folder}: tensor {missing[0]} is missing ({len(missing)} in all)")
    return weights


def _copy(name: str, tensor: torch.Tensor, target: torch.Tensor, allowed: set[torch.dtype]) -> None:
    if tuple(tensor.shape) != tuple(target.shape):
        raise ValueError(
            f"tensor {name} has shape {list(tensor.shape)}, expected {list(target.shape)}"
        )
    if tensor.dtype not in allowed:
        raise ValueError(
            f"tensor {name} is {tensor.dtype}, expected {' or '.join(sorted(map(str, allowed)))}"
        )
    target.copy_(tensor)


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    index = folder / "model.safetensors.index.json"
    shards = (
        sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if index.exists()
        else ["model.safetensors"]
    )
    for shard in shards:
        if not (folder / shard).exists():
            raise ValueError(f"{folder / shard} does not exist")
        try:
            with safe_open(folder / shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (a safetensors file is no dict)
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{folder / shard}: {error}") from None


def _targets(weights: Weights, c: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Checkpoint name and the memory it fills."""
    yield "model.embed_tokens.weight", weights.embedding
    yield "model.norm.weight", weights.norm
    if not c.tie_word_embeddings:
        yield "lm_head.weight", weights.head
    kv = c.num_key_value_heads * c.head_dim
    for i, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.split((c.qkv_size - 2 * kv, kv, kv))
        gate, up = layer.gate_up.chunk(2)
        attention = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": layer.output}
        attention |= {"q_norm": layer.q_norm, "k_norm": layer.k_norm}
        mlp = {"gate_proj": gate, "up_proj": up, "down_proj": layer.down}
        norms = {"input_layernorm": layer.input_norm, "post_attention_layernorm": layer.post_norm}
        for part, tensors in (("self_attn.", attention), ("mlp.", mlp), ("", norms)):
            for name, tensor in tensors.items():
                yield f"model.layers.{i}.{part}{name}.weight", tensor

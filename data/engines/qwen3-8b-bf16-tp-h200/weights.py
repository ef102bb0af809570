"""Strict loader of one rank's weights: every tensor of the checkpoint is used once, has the right
shape and dtype, or is refused by name.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .config import ModelConfig
from .group import Group

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
    head: torch.Tensor  # [V / world, H]: this rank's part of the vocabulary


@dataclass
class Part:
    """Where a tensor, or this rank's slice of it along `dim`, goes."""

    target: torch.Tensor
    dim: int = 0
    slices: int = 1
    index: int = 0

    @property
    def shape(self) -> list[int]:
        """Of the whole tensor."""
        shape = list(self.target.shape)
        shape[self.dim] *= self.slices
        return shape

    def copy(self, tensor: torch.Tensor) -> None:
        width = self.target.shape[self.dim]
        self.target.copy_(tensor.narrow(self.dim, self.index * width, width))


def empty_weights(c: ModelConfig, group: Group, device: str, dtype: torch.dtype) -> Weights:
    """Memory for one rank's weights, `c` being its shard; tied ones share it."""

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
    embedding, rows = new(c.vocab_size, h), c.vocab_size // group.world
    tied = embedding.narrow(0, group.rank * rows, rows)
    return Weights(embedding, layers, new(h), tied if c.tie_word_embeddings else new(rows, h))


def load_weights(
    folder: Path, whole: ModelConfig, group: Group, device: str, dtype: torch.dtype
) -> Weights:
    """Reads model.safetensors, or the shards of its index, into `dtype` on `device`.

    ValueError names a tensor that is missing, left over, twice there, or of the wrong shape or
    dtype.
    """
    c = whole.shard(group.world)
    weights = empty_weights(c, group, device, dtype)
    targets = dict(_targets(weights, c, whole, group))
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


def _copy(name: str, tensor: torch.Tensor, part: Part, allowed: set[torch.dtype]) -> None:
    if list(tensor.shape) != part.shape:
        raise ValueError(f"tensor {name} has shape {list(tensor.shape)}, expected {part.shape}")
    if tensor.dtype not in allowed:
        raise ValueError(
            f"tensor {name} is {tensor.dtype}, expected {' or '.join(sorted(map(str, allowed)))}"
        )
    part.copy(tensor)


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


def _targets(
    weights: Weights, c: ModelConfig, whole: ModelConfig, group: Group
) -> Iterator[tuple[str, Part]]:
    """Checkpoint name and the memory it fills: rows of what widens, columns of what narrows.

    Ranks that are more than the key-value heads share one head by several.
    """
    world, rank = group.world, group.rank
    kv_parts = min(world, whole.num_key_value_heads)
    yield "model.embed_tokens.weight", Part(weights.embedding)
    yield "model.norm.weight", Part(weights.norm)
    if not c.tie_word_embeddings:
        yield "lm_head.weight", Part(weights.head, 0, world, rank)
    kv = c.num_key_value_heads * c.head_dim
    for i, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.split((c.qkv_size - 2 * kv, kv, kv))
        rows = {"self_attn.q_proj": q}
        rows |= zip(("mlp.gate_proj", "mlp.up_proj"), layer.gate_up.chunk(2), strict=True)
        columns = {"self_attn.o_proj": layer.output, "mlp.down_proj": layer.down}
        same = {"self_attn.q_norm": layer.q_norm, "self_attn.k_norm": layer.k_norm}
        same |= {"input_layernorm": layer.input_norm, "post_attention_layernorm": layer.post_norm}
        parts = {name: Part(tensor, 0, world, rank) for name, tensor in rows.items()}
        parts |= {name: Part(tensor, 1, world, rank) for name, tensor in columns.items()}
        parts |= {name: Part(tensor) for name, tensor in same.items()}
        for name, tensor in (("k_proj", k), ("v_proj", v)):
            parts[f"self_attn.{name}"] = Part(tensor, 0, kv_parts, rank * kv_parts // world)
        for name, part in parts.items():
            yield f"model.layers.{i}.{name}.weight", part

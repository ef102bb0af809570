"""Strict loading of a checkpoint into the fused float32 matrices that the model multiplies with."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .checks import json_object
from .config import ModelConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = frozenset({"F32", "BF16", "F16"})


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; E hidden, N query heads, K key/value heads, D head dim, F MLP width."""

    input_norm: Tensor  # [E]
    qkv: Tensor  # [(N + 2K) * D, E]
    q_norm: Tensor  # [D]
    k_norm: Tensor  # [D]
    output: Tensor  # [E, N * D]
    mlp_norm: Tensor  # [E]
    gate_up: Tensor  # [2F, E]
    down: Tensor  # [E, F]


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights; `head` is `embedding` itself when the two are tied."""

    embedding: Tensor  # [V, E]
    layers: list[LayerWeights]
    norm: Tensor  # [E]
    head: Tensor  # [V, E]


def load_weights(folder: Path, config: ModelConfig) -> ModelWeights:
    """Read every tensor that the configuration asks for, and no other, as float32.

    ValueError names the file or the tensor at fault: missing, left over, wrong shape or dtype.
    """
    weights = _allocate(config)
    targets = _targets(weights, config)
    shards = _shards(folder)
    _check(shards, targets, config)
    for path, names in shards.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                if name in targets:
                    targets[name].copy_(file.get_tensor(name))
    return weights


def _allocate(config: ModelConfig) -> ModelWeights:
    """Uninitialised weights of the right shapes."""
    hidden, dim = config.hidden_size, config.head_dim
    query, key_value = config.num_heads * dim, config.num_kv_heads * dim
    embedding = torch.empty(config.vocab_size, hidden)
    layers = [
        LayerWeights(
            input_norm=torch.empty(hidden),
            qkv=torch.empty(query + 2 * key_value, hidden),
            q_norm=torch.empty(dim),
            k_norm=torch.empty(dim),
            output=torch.empty(hidden, query),
            mlp_norm=torch.empty(hidden),
            gate_up=torch.empty(2 * config.intermediate_size, hidden),
            down=torch.empty(hidden, config.intermediate_size),
        )
        for _ in range(config.num_layers)
    ]
    head = embedding if config.tie_word_embeddings else torch.empty_like(embedding)
    return ModelWeights(embedding, layers, torch.empty(hidden), head)


def _targets(weights: ModelWeights, config: ModelConfig) -> dict[str, Tensor]:
    """Tensor name in the checkpoint -> where it goes, a view of exactly the tensor's shape."""
    targets = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    if not config.tie_word_embeddings:
        targets["lm_head.weight"] = weights.head
    for index, layer in enumerate(weights.layers):
        for name, target in _layer_targets(layer, config).items():
            targets[f"model.layers.{index}.{name}.weight"] = target
    return targets


def _layer_targets(layer: LayerWeights, config: ModelConfig) -> dict[str, Tensor]:
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    q, k, v = layer.qkv.split([query, key_value, key_value])
    gate, up = layer.gate_up.chunk(2)
    return {
        "input_layernorm": layer.input_norm,
        "self_attn.q_proj": q,
        "self_attn.k_proj": k,
        "self_attn.v_proj": v,
        "self_attn.q_norm": layer.q_norm,
        "self_attn.k_norm": layer.k_norm,
        "self_attn.o_proj": layer.output,
        "post_attention_layernorm": layer.mlp_norm,
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": layer.down,
    }


def _shards(folder: Path) -> dict[Path, dict[str, tuple[list[int], str]]]:
    """File -> name -> (shape, dtype) of the tensors that it holds."""
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: _header(folder / SINGLE_FILE)}
    if not (folder / INDEX_FILE).is_file():
        raise ValueError(f"the checkpoint has no {SINGLE_FILE}")
    weight_map = json_object(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{INDEX_FILE} must hold an object weight_map")
    shards = {}
    for shard in sorted({str(shard) for shard in weight_map.values()}):
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise ValueError(f"{INDEX_FILE} names {shard}, which the checkpoint lacks")
        shards[folder / shard] = _header(folder / shard)
    _check_index(weight_map, shards)
    return shards


def _header(path: Path) -> dict[str, tuple[list[int], str]]:
    """Name -> (shape, dtype) of one file's tensors. ValueError names a file that is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path.name} is no whole safetensors file: {error}") from error


def _check_index(weight_map: dict, shards: dict[Path, dict]) -> None:
    """Each tensor must lie in the shard that the index gives for it, and only there."""
    held = {(name, path.name) for path, names in shards.items() for name in names}
    mapped = {(name, str(shard)) for name, shard in weight_map.items()}
    for name, shard in sorted(mapped - held):
        raise ValueError(f"tensor {name} is missing in {shard}")
    for name, shard in sorted(held - mapped):
        raise ValueError(f"tensor {name} is left over in {shard}")


def _check(shards: dict[Path, dict], targets: dict[str, Tensor], config: ModelConfig) -> None:
    """Compare what the files hold with what the configuration asks for."""
    held = {name: entry for names in shards.values() for name, entry in names.items()}
    for name in sorted(targets.keys() - held.keys()):
        raise ValueError(f"tensor {name} is missing")
    for name in sorted(held.keys() - targets.keys()):
        if not _ignorable(name, config):
            raise ValueError(f"tensor {name} is left over")
    for name, target in targets.items():
        shape, dtype = held[name]
        if list(shape) != list(target.shape):
            raise ValueError(f"tensor {name} has shape {shape}, expected {list(target.shape)}")
        if dtype not in DTYPES:
            raise ValueError(f"tensor {name} has dtype {dtype}")


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Old exports carry the rotary buffer, some tied ones a copy of the embedding."""
    return name.endswith(".rotary_emb.inv_freq") or (
        name == "lm_head.weight" and config.tie_word_embeddings
    )

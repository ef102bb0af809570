"""Strict access to a checkpoint's safetensors files."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .config import ModelConfig, read_json

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F32", "BF16", "F16"}


class Checkpoint:
    """Tensors of one folder, compared with what config.json implies before any is read."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """Check names, shapes and dtypes; ValueError naming the tensor or the file."""
        self._folder = folder
        self._shard_of = _locate(folder)
        expected = expected_shapes(config)
        for name in self._shard_of.keys() - expected.keys():
            if not _ignored(name, config):
                raise ValueError(f"tensor {name} is left over: the model has no such tensor")
        for name in expected:
            if name not in self._shard_of:
                raise ValueError(f"tensor {name} is missing")
        self._check_layout(expected)

    def read(self, name: str) -> Tensor:
        """Return a float32 copy of one tensor.

        The file is opened for this tensor alone: a mapping that stays open keeps the pages of
        all tensors read so far, a second copy of the model at the peak.
        """
        with _open(self._folder / self._shard_of[name]) as file:
            return file.get_tensor(name).to(torch.float32, copy=True)

    def _check_layout(self, expected: dict[str, tuple[int, ...]]) -> None:
        for shard in sorted(set(self._shard_of.values())):
            with _open(self._folder / shard) as file:
                for name in file.keys() & expected.keys():
                    stored = file.get_slice(name)
                    _check_tensor(name, stored.get_dtype(), stored.get_shape(), expected[name])


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor the model needs; weights are [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    per_layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{index}.{part}.weight": shape
        for index in range(config.num_hidden_layers)
        for part, shape in per_layer.items()
    }
    shapes["model.embed_tokens.weight"] = (config.vocab_size, hidden)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _ignored(name: str, config: ModelConfig) -> bool:
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    return name.endswith(".rotary_emb.inv_freq")


def _check_tensor(name: str, dtype: str, shape: list[int], expected: tuple[int, ...]) -> None:
    if tuple(shape) != expected:
        raise ValueError(f"tensor {name} has shape {list(shape)}, expected {list(expected)}")
    if dtype not in _DTYPES:
        raise ValueError(f"tensor {name} has dtype {dtype}, expected one of {sorted(_DTYPES)}")


def _open(path: Path) -> Any:
    """Open a safetensors file; ValueError naming it when it is missing or damaged."""
    if not path.is_file():
        raise ValueError(f"{path.name} is missing in {path.parent}")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path.name} is not a valid safetensors file: {error}") from error


def _locate(folder: Path) -> dict[str, str]:
    """Map every stored tensor's name to its file's name."""
    if (folder / _INDEX).is_file() and not (folder / _SINGLE).is_file():
        return _locate_shards(folder)
    with _open(folder / _SINGLE) as file:
        return dict.fromkeys(file.keys(), _SINGLE)


def _locate_shards(folder: Path) -> dict[str, str]:
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{_INDEX} lacks the field weight_map")
    stored: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{_INDEX} maps {name} to {shard!r}, not to a file of the folder")
        if shard not in stored:
            with _open(folder / shard) as file:
                stored[shard] = set(file.keys())
        if name not in stored[shard]:
            raise ValueError(f"tensor {name} is missing in {shard}, where {_INDEX} puts it")
    for shard, names in stored.items():
        for name in names:
            if weight_map.get(name) != shard:
                raise ValueError(f"tensor {name} is left over in {shard}: {_INDEX} differs")
    return weight_map

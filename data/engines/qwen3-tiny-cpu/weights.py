"""Strict loading of safetensors checkpoints into the layout that the model multiplies with.

Three things are folded in at load, so that a step has fewer operations:

- The weights of input_layernorm and post_attention_layernorm go into the columns of the matrix
  that follows, and sqrt(C) goes with every norm weight: the model's norm (model.normalise)
  divides by the root of the sum of squares, not of their mean.
- q, k and v become one matrix, gate and up another.
- The rows of each q and k head are reordered from (x1, x2) halves to pairs (x1[0], x2[0], x1[1],
  ...), so that RoPE is one complex product. Scores do not change: q and k are reordered alike.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .config import Config, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ALLOWED_DTYPES = ("F32", "BF16", "F16")
Shape = tuple[int, ...]
Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer; a name in _t is the transposed view of a [out, in] matrix."""

    qkv: Tensor  # [(N + 2K)·D, E]
    qk_norm: Tensor  # [N + K, D]
    o_t: Tensor  # [N·D, E]
    gate_up: Tensor  # [2F, E]
    down_t: Tensor  # [F, E]


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the whole model; head is embed itself when tied."""

    embed: Tensor  # [V, E]
    layers: list[Layer]
    norm: Tensor  # [E]
    head: Tensor  # [V, E]


def load_weights(folder: Path, config: Config) -> Weights:
    """Load a checkpoint in float32.

    ValueError names the tensor that is missing, left over or of a wrong shape or dtype, or the
    file that is absent or broken.
    """
    files = _locate(folder, _expected_shapes(config), config.tie_word_embeddings)

    def read(name: str) -> Tensor:
        # Opened anew for each tensor: its pages are released before the next one is read.
        with _open(files[name]) as file:
            return file.get_tensor(name).to(torch.float32, copy=True)

    embed = read("model.embed_tokens.weight")
    return Weights(
        embed=embed,
        layers=[_load_layer(read, i, config) for i in range(config.num_hidden_layers)],
        norm=read("model.norm.weight") * math.sqrt(config.hidden_size),
        head=embed if config.tie_word_embeddings else read("lm_head.weight"),
    )


def _load_layer(read: Read, index: int, config: Config) -> Layer:
    """Fuse and fold the tensors of one layer."""

    def part(name: str) -> Tensor:
        return read(f"model.layers.{index}.{name}.weight")

    root = math.sqrt(config.hidden_size)
    dim = config.head_dim
    query, key = (_pairs(part(f"self_attn.{name}_proj"), dim) for name in "qk")
    norms = (
        _pairs(part("self_attn.q_norm"), dim).expand(config.num_attention_heads, dim),
        _pairs(part("self_attn.k_norm"), dim).expand(config.num_key_value_heads, dim),
    )
    gate_up = torch.cat([part("mlp.gate_proj"), part("mlp.up_proj")])
    return Layer(
        qkv=torch.cat([query, key, part("self_attn.v_proj")]).mul_(part("input_layernorm") * root),
        qk_norm=torch.cat(norms) * math.sqrt(dim),
        o_t=part("self_attn.o_proj").t(),
        gate_up=gate_up.mul_(part("post_attention_layernorm") * root),
        down_t=part("mlp.down_proj").t(),
    )


def _pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows [heads · D, ...] of each head from two halves to D/2 pairs."""
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).reshape(weight.shape)


def _expected_shapes(config: Config) -> dict[str, Shape]:
    """Name and shape of every tensor that a checkpoint of this configuration holds."""
    vocab, hidden = config.vocab_size, config.hidden_size
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    for index in range(config.num_hidden_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{index}.{name}.weight"] = shape
    return shapes


def _layer_shapes(config: Config) -> dict[str, Shape]:
    """Name and shape of every tensor of one layer."""
    hidden, ffn, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_attention_heads * dim, config.num_key_value_heads * dim
    return {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_rows, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.o_proj": (hidden, q_rows),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }


def _locate(folder: Path, shapes: dict[str, Shape], tied: bool) -> dict[str, Path]:
    """Find the file of every expected tensor, from the headers alone; refuse any deviation."""
    files: dict[str, Path] = {}
    for name, path, shape, dtype in _held_tensors(folder):
        if name.endswith(".rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
            continue
        if name not in shapes:
            raise ValueError(f"tensor {name} is left over: no part of this model")
        if shape != shapes[name]:
            raise ValueError(f"tensor {name} has shape {shape}, not {shapes[name]}")
        if dtype not in ALLOWED_DTYPES:
            raise ValueError(f"tensor {name} has dtype {dtype}, which is not supported")
        files[name] = path
    for name in shapes:
        if name not in files:
            raise ValueError(f"tensor {name} is missing")
    return files


def _held_tensors(folder: Path) -> Iterator[tuple[str, Path, Shape, str]]:
    """Yield name, file, shape and dtype of every tensor that the checkpoint's files hold."""
    index = _read_index(folder)
    for path in sorted({folder / file for file in index.values()} or {folder / SINGLE_FILE}):
        with _open(path) as file:
            names = file.keys()
            for name in names:
                if index and index.get(name) != path.name:
                    raise ValueError(f"tensor {name} is in {path.name}, not where the index says")
                part = file.get_slice(name)
                yield name, path, tuple(part.get_shape()), part.get_dtype()


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> shard; empty where the checkpoint is a single file."""
    if (folder / SINGLE_FILE).exists() or not (folder / INDEX_FILE).exists():
        return {}
    index = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ValueError(f"{INDEX_FILE} has no weight_map")
    for name, file in index.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{INDEX_FILE} names no file of its folder for tensor {name}")
    return index


def _open(path: Path) -> safe_open:
    """Open one safetensors file; ValueError names it when it is absent, truncated or another."""
    if not path.is_file():
        raise ValueError(f"{path.name} is missing")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path.name} is not a whole safetensors file: {error}") from error

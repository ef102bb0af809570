"""The strict checkpoint reader: every tensor is checked by name before any is loaded."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .config import ModelConfig

FLOAT_TYPES = frozenset({"F32", "BF16", "F16"})
ROTARY_BUFFER = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


class Weights:
    """The tensors of a checkpoint whose names, shapes and types have been checked."""

    def __init__(self, holders: dict[str, Any]) -> None:
        self._holders = holders

    def read(self, name: str) -> Tensor:
        """One tensor as float32, a copy that does not refer to the file."""
        return self._holders[name].get_tensor(name).to(torch.float32, copy=True)


@contextmanager
def open_weights(folder: Path, config: ModelConfig) -> Iterator[Weights]:
    """Open and check the checkpoint's tensors; ValueError names a wrong file or tensor."""
    with ExitStack() as stack:
        holders = _find_tensors(folder, stack)
        _check(holders, expected_shapes(config), config.tied)
        yield Weights(holders)


def expected_shapes(config: ModelConfig) -> dict[str, list[int]]:
    """Name and shape of every tensor that the config asks for."""
    embed, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    shapes = {
        "model.embed_tokens.weight": [config.vocab_size, embed],
        "model.norm.weight": [embed],
    }
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        shapes |= {
            f"{layer}input_layernorm.weight": [embed],
            f"{layer}self_attn.q_proj.weight": [queries, embed],
            f"{layer}self_attn.k_proj.weight": [keys, embed],
            f"{layer}self_attn.v_proj.weight": [keys, embed],
            f"{layer}self_attn.o_proj.weight": [embed, queries],
            f"{layer}post_attention_layernorm.weight": [embed],
            f"{layer}mlp.gate_proj.weight": [inner, embed],
            f"{layer}mlp.up_proj.weight": [inner, embed],
            f"{layer}mlp.down_proj.weight": [embed, inner],
        }
    if not config.tied:
        shapes["lm_head.weight"] = [config.vocab_size, embed]
    return shapes


def _find_tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> open file that holds it, from one file or from the index's shards."""
    if (folder / "model.safetensors").is_file():
        handle = _open(folder / "model.safetensors", stack)
        return dict.fromkeys(handle.keys(), handle)
    listed = _read_index(folder / "model.safetensors.index.json")
    handles = {shard: _open(folder / shard, stack) for shard in sorted(set(listed.values()))}
    held = {(name, shard) for shard, handle in handles.items() for name in handle.keys()}  # noqa: SIM118
    odd = sorted(name for name, _ in held ^ set(listed.items()))
    if odd:
        raise ValueError(f"the index and its shards disagree about {', '.join(odd)}")
    return {name: handles[shard] for name, shard in listed.items()}


def _read_index(path: Path) -> dict[str, str]:
    """The index's weight_map: tensor name -> file name of its shard."""
    if not path.is_file():
        raise ValueError(f"{path.parent} holds neither model.safetensors nor {path.name}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from error
    listed = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ValueError(f"{path.name} has no weight_map from tensor names to file names")
    outside = sorted(shard for shard in listed.values() if Path(shard).name != shard)
    if outside:
        raise ValueError(f"{path.name} names files outside the checkpoint: {outside[0]}")
    return listed


def _open(path: Path, stack: ExitStack) -> Any:
    """An open safetensors file; its header is checked against its length here."""
    if not path.is_file():
        raise ValueError(f"{path.name} is missing from {path.parent}")
    try:
        return stack.enter_context(safe_open(path, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path.name} is not a whole safetensors file: {error}") from error


def _check(holders: dict[str, Any], expected: dict[str, list[int]], tied: bool) -> None:
    """Raise ValueError with the full name of every tensor that is not as expected."""
    problems = [f"{name} is missing" for name in sorted(expected.keys() - holders.keys())]
    for name in sorted(holders):
        if name not in expected:
            if not (ROTARY_BUFFER.fullmatch(name) or (tied and name == "lm_head.weight")):
                problems.append(f"{name} is left over")
            continue
        found = holders[name].get_slice(name)
        if list(found.get_shape()) != expected[name]:
            problems.append(f"{name} has shape {found.get_shape()}, not {expected[name]}")
        if found.get_dtype() not in FLOAT_TYPES:
            problems.append(f"{name} has dtype {found.get_dtype()}")
    if problems:
        raise ValueError("the checkpoint does not fit config.json: " + "; ".join(problems))

"""Tiny random checkpoints of the dense families in true Hugging Face layout, from a seed.

Small, but not degenerate: attention is neither uniform nor a single position, each block changes
the residual stream about as much as the embedding does, norm weights differ from 1, and epsilon is
large enough to matter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from metainfer_lab.model import ModelDims

if TYPE_CHECKING:
    import torch

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
LOGIT_STD = 3.0  # of an untrained head's logits: wide enough for greedy choices to mean something


def draw_dims(
    rng: np.random.Generator, like: ModelDims, granules: Mapping[str, int], **fixed: Any
) -> dict[str, Any]:
    """Config fields of a small model built like `like` (family, tied head), drawn at random.

    Each dimension is a multiple of its granule; `fixed` overrides what is drawn.
    """

    def multiple(name: str, low: int, high: int, of: int = 1) -> int:
        granule = math.lcm(granules.get(name, 1), of)
        return granule * int(rng.integers(max(1, -(-low // granule)), max(1, high // granule) + 1))

    kv_heads = multiple("num_key_value_heads", 1, 3)
    heads = kv_heads * int(rng.integers(1, 5))
    # transformers wants it of Llama, though nothing in the formulas does
    whole_heads = heads if like.family == "llama" else 1
    drawn = {
        "hidden_size": multiple("hidden_size", 40, 72, of=whole_heads),
        "num_hidden_layers": int(rng.integers(2, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": multiple("head_dim", 8, 24, of=2),
        "intermediate_size": multiple("intermediate_size", 50, 110),
        "vocab_size": multiple("vocab_size", 150, 260),
        "max_position_embeddings": int(rng.integers(300, 400)),
        # none that a shipped model has: an engine that ignores its config must show
        "rope_theta": float(rng.choice([3e3, 2e4, 7e4])),
        "rms_norm_eps": float(rng.choice([2e-4, 1e-3, 2e-2])),
        "tie_word_embeddings": like.tie_word_embeddings,
    }
    return drawn | fixed


def tiny_config(family: str, dims: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as transformers writes it for the family."""
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_scaling": None,
        "torch_dtype": "float32",
        **dims,
    }


def tiny_checkpoint(
    family: str,
    seed: int,
    folder: Path,
    *,
    shards: int = 1,
    dtype: str = "float32",
    edit: Callable[[ModelDims, dict[str, torch.Tensor]], None] | None = None,
    **dims: Any,
) -> Path:
    """Write config.json and safetensors (several with an index for shards > 1); the folder.

    dims: config fields as `draw_dims` gives them; edit: changes the drawn float32 tensors in place
    before they are written. The same arguments give the same bytes.
    """
    import torch

    config = tiny_config(family, dims) | {"torch_dtype": dtype}
    geometry = ModelDims.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _draw(name, shape, geometry, generator) for name, shape in geometry.tensors().items()
    }
    if edit is not None:
        edit(geometry, tensors)
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    folder.mkdir(parents=True)
    write_config(folder, config)
    write_tensors(folder, tensors, shards)
    return folder


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """config.json and the generation_config.json that goes with it."""
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    ends = {"eos_token_id": config["eos_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(ends))


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], shards: int = 1) -> None:
    """model.safetensors, or shards with model.safetensors.index.json."""
    from safetensors.torch import save_file

    metadata = {"format": "pt"}
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata=metadata)
        return
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        part = names[i::shards]
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata=metadata)
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _draw(
    name: str, shape: tuple[int, ...], dims: ModelDims, generator: torch.Generator
) -> torch.Tensor:
    import torch

    noise = torch.randn(shape, generator=generator)
    embedding = LOGIT_STD / dims.hidden_size**0.5
    if "norm" in name:
        return 1 + 0.3 * noise
    if "embed_tokens" in name or "lm_head" in name:
        return embedding * noise
    spread = noise / shape[1] ** 0.5
    if "q_proj" in name or "k_proj" in name:
        return 1.4 * spread  # scores of unit spread and more: attention that looks somewhere
    if "o_proj" in name or "down_proj" in name:
        return 1.5 * embedding * spread
    return 1.2 * spread

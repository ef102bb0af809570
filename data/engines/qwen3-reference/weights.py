"""safetensors into named tensors, strictly: every expected tensor once, and no other."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .config import Config
from .parallel import Group

Shape = tuple[int, ...]
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def expected(config: Config) -> dict[str, Shape]:
    """Name -> shape of every tensor that the model computes with."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    if config.qk_norm:
        layer |= {"self_attn.q_norm": (config.head_dim,), "self_attn.k_norm": (config.head_dim,)}
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def read(
    folder: Path, config: Config, device: torch.device, dtype: torch.dtype, group: Group
) -> dict[str, torch.Tensor]:
    """A rank's part of the weights as `dtype` on `device`; ValueError names the tensor or the file
    at fault."""
    shapes = expected(config)
    weights: dict[str, torch.Tensor] = {}
    for path in _files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    if _is_unused(name, config):
                        continue
                    _check(name, file, shapes, weights)
                    part = group.part(name, file.get_tensor(name), config.num_key_value_heads)
                    weights[name] = part.to(device, dtype)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"checkpoint: {path.name} cannot be read ({error})") from error
    for name in shapes:
        if name not in weights:
            raise ValueError(f"checkpoint: tensor {name} is missing")
    return weights


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    names = json.loads(index.read_text())["weight_map"].values()
    return [folder / name for name in sorted(set(names))]


def _is_unused(name: str, config: Config) -> bool:
    """Known and without effect: an old buffer, and the head's copy of a tied embedding."""
    tied_head = config.tie_word_embeddings and name == "lm_head.weight"
    return tied_head or name.endswith(".rotary_emb.inv_freq")


def _check(name: str, file: safe_open, shapes: dict[str, Shape], seen: dict[str, torch.Tensor]):
    if name not in shapes:
        raise ValueError(
            f"checkpoint: tensor {name} is left over; this model has none of that name"
        )
    if name in seen:
        raise ValueError(f"checkpoint: tensor {name} is there twice")
    view = file.get_slice(name)
    if tuple(view.get_shape()) != shapes[name]:
        shape = tuple(view.get_shape())
        raise ValueError(f"checkpoint: tensor {name} has shape {shape}, expected {shapes[name]}")
    if view.get_dtype() not in FLOATS:
        raise ValueError(f"checkpoint: tensor {name} has dtype {view.get_dtype()}, not a float one")

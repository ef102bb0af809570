"""Dimensions and constants of a model, from config.json and generation_config.json."""

import math
from dataclasses import dataclass
from pathlib import Path

from .checks import boolean, integer, json_object, number


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the forward pass and the scheduler need to know of a Qwen3 checkpoint."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    end_tokens: frozenset[int]


def read_config(folder: Path) -> ModelConfig:
    """Read and check a checkpoint's configuration. ValueError names the file or field at fault."""
    raw = json_object(folder / "config.json")
    _refuse_other_models(raw)
    num_heads = _size(raw, "num_attention_heads")
    num_kv_heads = _size(raw, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ValueError("num_key_value_heads must divide num_attention_heads")
    vocab_size = _size(raw, "vocab_size")
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=_size(raw, "hidden_size"),
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=_size(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(raw, num_heads),
        rms_norm_eps=number("rms_norm_eps", _field(raw, "rms_norm_eps"), 0.0),
        rope_theta=_rope_theta(raw),
        max_position_embeddings=_size(raw, "max_position_embeddings"),
        tie_word_embeddings=boolean("tie_word_embeddings", _field(raw, "tie_word_embeddings")),
        end_tokens=_end_tokens(folder, raw, vocab_size),
    )


def _field(raw: dict, name: str) -> object:
    if raw.get(name) is None:
        raise ValueError(f"config.json lacks {name}")
    return raw[name]


def _size(raw: dict, name: str) -> int:
    return integer(name, _field(raw, name), 1)


def _refuse_other_models(raw: dict) -> None:
    """Refuse whatever the forward pass does not compute."""
    if _field(raw, "model_type") != "qwen3":
        raise ValueError("model_type must be qwen3")
    if _field(raw, "hidden_act") != "silu":
        raise ValueError("hidden_act must be silu")
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if boolean(name, raw.get(name, False)):
            raise ValueError(f"{name} is not supported")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or []):
        raise ValueError("layer_types other than full_attention are not supported")


def _head_dim(raw: dict, num_heads: int) -> int:
    if raw.get("head_dim") is not None:
        head_dim = integer("head_dim", raw["head_dim"], 1)
    else:
        head_dim, rest = divmod(_size(raw, "hidden_size"), num_heads)
        if rest:
            raise ValueError("without head_dim, num_attention_heads must divide hidden_size")
    if head_dim % 2 or head_dim == 0:
        raise ValueError("head_dim must be even, as rotary embedding turns pairs")
    return head_dim


def _rope_theta(raw: dict) -> float:
    """The base of the rotary embedding; only the unscaled form is supported."""
    if raw.get("rope_scaling") is not None:
        raise ValueError("rope_scaling is not supported")
    parameters = raw.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise ValueError("rope_parameters must be an object")
    if parameters.get("rope_type", "default") != "default":
        raise ValueError("rope_parameters: the rope_type must be default")
    theta = raw.get("rope_theta")
    if theta is None:
        theta = parameters.get("rope_theta", 10000.0)
    return number("rope_theta", theta, math.ulp(0.0))


def _end_tokens(folder: Path, raw: dict, vocab_size: int) -> frozenset[int]:
    """Ids that end an answer; those beyond the vocabulary can never occur and are left out."""
    generation = folder / "generation_config.json"
    given = json_object(generation) if generation.is_file() else {}
    ends = given.get("eos_token_id", raw.get("eos_token_id"))
    listed = [] if ends is None else ends if isinstance(ends, list) else [ends]
    ids = [integer("eos_token_id", end, 0) for end in listed]
    return frozenset(end for end in ids if end < vocab_size)

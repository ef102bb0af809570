"""The model's dimensions, read from config.json and checked before anything is loaded."""

import json
import math
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions and constants of one checkpoint."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    tied: bool
    end_tokens: frozenset[int]


def is_int(value: object) -> bool:
    """Whether value is an integer; a bool is not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether value is a finite real number; a bool is not."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def read_config(folder: Path) -> ModelConfig:
    """Read config.json and generation_config.json; ValueError names the file or the field."""
    raw = _read_json(folder / "config.json")
    _refuse_unsupported(raw)
    heads = _size(raw, "num_attention_heads")
    kv_heads = _size(raw, "num_key_value_heads")
    if heads % kv_heads:
        raise ValueError("num_attention_heads is not a multiple of num_key_value_heads")
    return ModelConfig(
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=_size(raw, "hidden_size"),
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=_size(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(raw, heads),
        max_positions=_size(raw, "max_position_embeddings"),
        rms_norm_eps=_positive(_field(raw, "rms_norm_eps"), "rms_norm_eps"),
        rope_theta=_rope_theta(raw),
        tied=_flag(_field(raw, "tie_word_embeddings"), "tie_word_embeddings"),
        end_tokens=_end_tokens(folder, raw),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object of the checkpoint."""
    if not path.is_file():
        raise ValueError(f"{path.name} is missing from {path.parent}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path.name} does not hold a JSON object")
    return raw


def _field(raw: dict[str, Any], name: str) -> Any:
    """A required field."""
    if name not in raw:
        raise ValueError(f"config.json lacks the field {name}")
    return raw[name]


def _size(raw: dict[str, Any], name: str) -> int:
    """A required positive integer."""
    value = _field(raw, name)
    if not is_int(value) or value < 1:
        raise ValueError(f"{name} must be a positive integer, not {value!r}")
    return int(value)


def _positive(value: object, name: str) -> float:
    """A positive finite number."""
    if not is_number(value) or value <= 0:
        raise ValueError(f"{name} must be a positive number, not {value!r}")
    return float(value)


def _flag(value: object, name: str) -> bool:
    """A JSON boolean."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}")
    return value


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    """Refuse what would need other arithmetic than this engine's."""
    for name, wanted in (("model_type", "llama"), ("hidden_act", "silu")):
        if _field(raw, name) != wanted:
            raise ValueError(f"{name} must be {wanted!r}, not {raw[name]!r}")
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name) not in (None, False):
            raise ValueError(f"{name} is not supported")
    if raw.get("rope_scaling") is not None:
        raise ValueError("rope_scaling is not supported")


def _head_dim(raw: dict[str, Any], heads: int) -> int:
    """head_dim as given, or hidden_size / num_attention_heads; RoPE needs it even."""
    if raw.get("head_dim") is not None:
        size = _size(raw, "head_dim")
    else:
        size, rest = divmod(_size(raw, "hidden_size"), heads)
        if rest:
            raise ValueError("hidden_size is not a multiple of num_attention_heads")
    if size < 2 or size % 2:
        raise ValueError(f"head_dim must be even, not {size}")
    return size


def _rope_theta(raw: dict[str, Any]) -> float:
    """The base of the rotary frequencies, from either place where exports keep it."""
    rope = raw.get("rope_parameters")
    rope = {} if rope is None else rope
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise ValueError("rope_parameters must have the rope_type 'default'")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    return 10000.0 if theta is None else _positive(theta, "rope_theta")


def _end_tokens(folder: Path, raw: dict[str, Any]) -> frozenset[int]:
    """Ids that end an answer; generation_config.json comes first where it names them."""
    path = folder / "generation_config.json"
    generation = _read_json(path) if path.is_file() else {}
    value = generation.get("eos_token_id", raw.get("eos_token_id"))
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(is_int(token) for token in ids):
        raise ValueError(f"eos_token_id must hold integers, not {value!r}")
    return frozenset(int(token) for token in ids)

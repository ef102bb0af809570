"""Reading and checking config.json: every dimension of the model comes from there."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checks import id_list, integer, number


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions and constants of one dense decoder of the llama family."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    end_ids: tuple[int, ...]


def read_config(folder: Path) -> ModelConfig:
    """Read folder/config.json; ValueError naming the field that is missing or unsupported."""
    raw = read_json(folder / "config.json")
    _refuse_unsupported(raw)
    heads = _size(raw, "num_attention_heads")
    kv_heads = _size(raw, "num_key_value_heads")
    if heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
        )
    vocab_size = _size(raw, "vocab_size")
    return ModelConfig(
        hidden_size=_size(raw, "hidden_size"),
        intermediate_size=_size(raw, "intermediate_size"),
        vocab_size=vocab_size,
        num_hidden_layers=_size(raw, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=_head_dim(raw),
        max_position_embeddings=_size(raw, "max_position_embeddings"),
        rms_norm_eps=_positive("rms_norm_eps", _field(raw, "rms_norm_eps")),
        rope_theta=_rope_theta(raw),
        tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
        end_ids=_end_ids(folder, raw, vocab_size),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; ValueError naming the file when it is missing or is not one."""
    if not path.is_file():
        raise ValueError(f"{path.name} is missing in {path.parent}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} must hold a JSON object")
    return content


def _field(raw: dict[str, Any], name: str) -> Any:
    if name not in raw:
        raise ValueError(f"config.json lacks the field {name}")
    return raw[name]


def _size(raw: dict[str, Any], name: str) -> int:
    return integer(name, _field(raw, name), 1)


def _flag(raw: dict[str, Any], name: str) -> bool:
    value = _field(raw, name)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}")
    return value


def _positive(name: str, value: Any) -> float:
    result = number(name, value)
    if result <= 0:
        raise ValueError(f"{name} must be above 0, not {result}")
    return result


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    for name, wanted in (("model_type", "llama"), ("hidden_act", "silu")):
        value = _field(raw, name)
        if value != wanted:
            raise ValueError(f"{name} {value!r} is not supported, only {wanted!r}")
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name) not in (None, False):
            raise ValueError(f"{name} is not supported")
    if raw.get("rope_scaling") is not None:
        raise ValueError("rope_scaling is not supported")


def _head_dim(raw: dict[str, Any]) -> int:
    """head_dim, or hidden_size / num_attention_heads; even, because RoPE turns pairs."""
    if raw.get("head_dim") is not None:
        head_dim = _size(raw, "head_dim")
    else:
        hidden_size, heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
        if hidden_size % heads:
            raise ValueError(
                f"num_attention_heads {heads} does not divide hidden_size {hidden_size}"
            )
        head_dim = hidden_size // heads
    if head_dim % 2:
        raise ValueError(f"head_dim must be even, not {head_dim}")
    return head_dim


def _rope_theta(raw: dict[str, Any]) -> float:
    nested = raw.get("rope_parameters")
    if nested is None:
        nested = {}
    if not isinstance(nested, dict) or nested.get("rope_type", "default") != "default":
        raise ValueError(f"rope_parameters {nested!r} is not supported")
    value = nested.get("rope_theta", raw.get("rope_theta", 10000.0))
    return _positive("rope_theta", value)


def _end_ids(folder: Path, raw: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """End tokens: generation_config.json's eos_token_id, else config.json's; none when absent."""
    value = None
    path = folder / "generation_config.json"
    if path.exists():
        value = read_json(path).get("eos_token_id")
    if value is None:
        value = raw.get("eos_token_id")
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    return tuple(id_list("eos_token_id", values, vocab_size))

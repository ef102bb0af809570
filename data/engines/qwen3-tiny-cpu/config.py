"""What a checkpoint's config.json and generation_config.json say, checked field by field."""

import json
from dataclasses import dataclass
from pathlib import Path

from .checks import is_int, is_number


@dataclass(frozen=True, slots=True)
class Config:
    """Dimensions and constants of one Qwen3 model."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]


def read_config(folder: Path) -> Config:
    """Read and check the configuration; ValueError names the file or field at fault."""
    fields = read_json(folder / "config.json")
    _refuse_unsupported(fields)
    heads, kv_heads = _count(fields, "num_attention_heads"), _count(fields, "num_key_value_heads")
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} over num_key_value_heads {kv_heads}: uneven")
    return Config(
        hidden_size=_count(fields, "hidden_size"),
        intermediate_size=_count(fields, "intermediate_size"),
        num_hidden_layers=_count(fields, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=_head_dim(fields, heads),
        vocab_size=_count(fields, "vocab_size"),
        max_position_embeddings=_count(fields, "max_position_embeddings"),
        rms_norm_eps=_rms_norm_eps(fields),
        rope_theta=_rope_theta(fields),
        tie_word_embeddings=_tie_word_embeddings(fields),
        eos_token_ids=_eos_token_ids(folder, fields),
    )


def read_json(path: Path) -> dict:
    """Read a JSON object; ValueError names the file when it is missing or no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path.name}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} does not hold a JSON object")
    return value


def _refuse_unsupported(fields: dict) -> None:
    """Refuse what would need other arithmetic than this engine's."""
    for name, supported in (("model_type", "qwen3"), ("hidden_act", "silu")):
        if _required(fields, name) != supported:
            raise ValueError(f"{name} {fields[name]!r} is not supported, only {supported!r}")
    for name in ("attention_bias", "mlp_bias", "use_sliding_window", "rope_scaling"):
        if fields.get(name) not in (None, False):
            raise ValueError(f"{name} {fields[name]!r} is not supported")
    if set(fields.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError("layer_types other than full_attention are not supported")


def _required(fields: dict, name: str) -> object:
    """Value of a field that must be there."""
    if fields.get(name) is None:
        raise ValueError(f"config.json has no {name}")
    return fields[name]


def _count(fields: dict, name: str) -> int:
    """Value of a required field that counts something."""
    value = _required(fields, name)
    if not is_int(value) or value < 1:
        raise ValueError(f"{name} must be a positive integer, not {value!r}")
    return value


def _head_dim(fields: dict, heads: int) -> int:
    """Size of a head: given, or hidden_size over the heads; even, since RoPE turns pairs."""
    if fields.get("head_dim") is not None:
        head_dim = _count(fields, "head_dim")
    elif _count(fields, "hidden_size") % heads:
        raise ValueError(f"num_attention_heads {heads} does not divide the hidden size")
    else:
        head_dim = fields["hidden_size"] // heads
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd")
    return head_dim


def _rms_norm_eps(fields: dict) -> float:
    """The epsilon of every RMSNorm."""
    value = _required(fields, "rms_norm_eps")
    if not is_number(value) or value < 0:
        raise ValueError(f"rms_norm_eps must be a number of at least 0, not {value!r}")
    return float(value)


def _rope_theta(fields: dict) -> float:
    """Base of the rotary frequencies, at the top level or in rope_parameters; default 10000."""
    parameters = fields.get("rope_parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict):
        raise ValueError(f"rope_parameters must be an object, not {parameters!r}")
    if parameters.get("rope_type", "default") != "default":
        raise ValueError(f"rope_parameters: rope_type {parameters['rope_type']!r} not supported")
    theta = parameters.get("rope_theta", fields.get("rope_theta", 10000.0))
    if not is_number(theta) or theta <= 0:
        raise ValueError(f"rope_theta must be a positive number, not {theta!r}")
    return float(theta)


def _tie_word_embeddings(fields: dict) -> bool:
    """Whether the head is the embedding matrix."""
    value = _required(fields, "tie_word_embeddings")
    if not isinstance(value, bool):
        raise ValueError(f"tie_word_embeddings must be true or false, not {value!r}")
    return value


def _eos_token_ids(folder: Path, fields: dict) -> frozenset[int]:
    """End tokens: generation_config.json's where it names some, else config.json's."""
    value = fields.get("eos_token_id")
    if (folder / "generation_config.json").exists():
        given = read_json(folder / "generation_config.json").get("eos_token_id")
        value = value if given is None else given
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(is_int(token) and token >= 0 for token in ids):
        raise ValueError(f"eos_token_id must be a number or a list of numbers, not {value!r}")
    return frozenset(ids)

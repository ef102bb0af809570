"""`config.json` into `Config`; what this engine does not compute is refused by its field."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REFUSED_WHEN_TRUE = ("attention_bias", "mlp_bias", "use_sliding_window")


@dataclass(frozen=True)
class Config:
    """Dimensions of a dense decoder; qk_norm: per-head RMSNorm of q and k, as Qwen3 has it."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    qk_norm: bool
    eos_token_ids: frozenset[int]

    @classmethod
    def read(cls, folder: Path) -> "Config":
        """The config of a checkpoint folder; ValueError names the file or the field."""
        raw = _json(folder / "config.json")
        _refuse(raw)
        heads = _count(raw, "num_attention_heads")
        kv_heads = _count(raw, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ValueError(f"num_key_value_heads: {kv_heads} does not divide {heads} heads")
        rope = raw.get("rope_parameters") or {}
        return cls(
            hidden_size=_count(raw, "hidden_size"),
            num_hidden_layers=_count(raw, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=_head_dim(raw, heads),
            intermediate_size=_count(raw, "intermediate_size"),
            vocab_size=_count(raw, "vocab_size"),
            max_position_embeddings=_count(raw, "max_position_embeddings"),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
            rms_norm_eps=float(_need(raw, "rms_norm_eps")),
            tie_word_embeddings=bool(_need(raw, "tie_word_embeddings")),
            qk_norm=raw["model_type"] == "qwen3",
            eos_token_ids=_eos(raw, folder),
        )


def _refuse(raw: dict[str, Any]) -> None:
    if _need(raw, "model_type") not in ("llama", "qwen3"):
        raise ValueError(f"model_type: {raw['model_type']!r} is neither 'llama' nor 'qwen3'")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act: {raw['hidden_act']!r} is not 'silu'")
    for field in REFUSED_WHEN_TRUE:
        if raw.get(field):
            raise ValueError(f"{field}: true is not supported")
    if raw.get("rope_scaling"):
        raise ValueError("rope_scaling: only plain RoPE is supported")
    if (raw.get("rope_parameters") or {}).get("rope_type", "default") != "default":
        raise ValueError("rope_parameters: only rope_type 'default' is supported")


def _head_dim(raw: dict[str, Any], heads: int) -> int:
    hidden = _count(raw, "hidden_size")
    if raw.get("head_dim") is None and hidden % heads:
        raise ValueError(f"num_attention_heads: {heads} does not divide hidden_size {hidden}")
    head_dim = _count(raw, "head_dim", hidden // heads)
    if head_dim % 2:
        raise ValueError(f"head_dim: {head_dim} is odd; RoPE rotates pairs")
    return head_dim


def _eos(raw: dict[str, Any], folder: Path) -> frozenset[int]:
    generation = folder / "generation_config.json"
    found = _json(generation).get("eos_token_id") if generation.is_file() else None
    found = raw.get("eos_token_id") if found is None else found
    return frozenset([found] if isinstance(found, int) else found or [])


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"checkpoint: {path.name} is missing in {path.parent}") from None
    except ValueError as error:
        raise ValueError(f"checkpoint: {path.name} is not JSON ({error})") from None


def _need(raw: dict[str, Any], field: str) -> Any:
    if raw.get(field) is None:
        raise ValueError(f"{field}: missing in config.json")
    return raw[field]


def _count(raw: dict[str, Any], field: str, default: int | None = None) -> int:
    value = default if raw.get(field) is None and default is not None else _need(raw, field)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{field}: {value!r} is not a positive integer")
    return value

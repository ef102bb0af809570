"""Reads and checks config.json and generation_config.json."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LINEAR = "linear_attention"
FULL = "full_attention"
TEXT_TYPE = "qwen3_5_moe_text"
MULTIMODAL_TYPE = "qwen3_5_moe"
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class Config:
    """The model's dimensions, by their names in config.json."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    head_dim: int
    layer_types: tuple[str, ...]
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    prefix: str

    @property
    def key_width(self) -> int:
        """Width of all key heads of a linear-attention layer side by side, G * Dk."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        """Width of all value heads of a linear-attention layer side by side, H * Dv."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution, C = 2 * G * Dk + H * Dv."""
        return 2 * self.key_width + self.value_width


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; ValueError naming the file when there is none."""
    if not path.is_file():
        raise ValueError(f"{path.name} is missing in {path.parent}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} does not hold an object")
    return value


def read_config(folder: Path) -> Config:
    """Config of a checkpoint's folder; ValueError naming the field that is wrong or missing."""
    outer = read_json(folder / "config.json")
    fields, prefix = _text_fields(outer)
    _refuse_unsupported(fields)
    sizes = {name: _size(fields, name) for name in SIZES}
    head_dim = _head_dim(fields, sizes)
    _check_ratios(sizes)
    theta, rotary_dim = _rotary(fields, head_dim)
    return Config(
        **sizes,
        head_dim=head_dim,
        layer_types=_layer_types(fields, sizes["num_hidden_layers"]),
        rms_norm_eps=_positive(fields, "rms_norm_eps"),
        rope_theta=theta,
        rotary_dim=rotary_dim,
        tie_word_embeddings=_flag(outer, "tie_word_embeddings"),
        eos_token_ids=_end_tokens(folder, fields, sizes["vocab_size"]),
        prefix=prefix,
    )


def _text_fields(outer: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The text model's fields and its tensors' prefix, in either of the two layouts."""
    kind = _need(outer, "model_type")
    if kind == TEXT_TYPE:
        return outer, "model."
    if kind != MULTIMODAL_TYPE:
        raise ValueError(f"model_type {kind!r} is not of this engine's family")
    fields = _need(outer, "text_config")
    if not isinstance(fields, dict):
        raise ValueError("text_config is not an object")
    inner = _need(fields, "model_type")
    if inner != TEXT_TYPE:
        raise ValueError(f"model_type {inner!r} of the text model is not supported")
    return fields, "model.language_model."


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    """Refuse what would change the arithmetic, by the field's name."""
    allowed = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "attn_output_gate": (True,),
        "output_gate_type": ("swish",),
        "mlp_only_layers": ([], None),
        "rope_scaling": (None,),
    }
    for name, values in allowed.items():
        if name in fields and fields[name] not in values:
            raise ValueError(f"{name} {fields[name]!r} is not supported")


def _need(fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise ValueError(f"config.json lacks {name}")
    return fields[name]


def _size(fields: dict[str, Any], name: str) -> int:
    value = _need(fields, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, not {value!r}")
    return value


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = _need(fields, name)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}")
    return value


def _positive(fields: dict[str, Any], name: str) -> float:
    value = _need(fields, name)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a positive number, not {value!r}")
    return float(value)


def _head_dim(fields: dict[str, Any], sizes: dict[str, int]) -> int:
    """head_dim, or its default, an equal share of hidden_size."""
    if fields.get("head_dim") is not None:
        return _size(fields, "head_dim")
    if sizes["hidden_size"] % sizes["num_attention_heads"]:
        raise ValueError("head_dim is missing and has no whole default")
    return sizes["hidden_size"] // sizes["num_attention_heads"]


def _check_ratios(sizes: dict[str, int]) -> None:
    if sizes["num_attention_heads"] % sizes["num_key_value_heads"]:
        raise ValueError("num_key_value_heads does not divide num_attention_heads")
    if sizes["linear_num_value_heads"] % sizes["linear_num_key_heads"]:
        raise ValueError("linear_num_key_heads does not divide linear_num_value_heads")
    if sizes["num_experts_per_tok"] > sizes["num_experts"]:
        raise ValueError("num_experts_per_tok is above num_experts")


def _layer_types(fields: dict[str, Any], count: int) -> tuple[str, ...]:
    kinds = _need(fields, "layer_types")
    if not isinstance(kinds, list) or len(kinds) != count:
        raise ValueError(f"layer_types must be a list of {count} words")
    for kind in kinds:
        if kind not in (LINEAR, FULL):
            raise ValueError(f"layer_types holds {kind!r}")
    return tuple(kinds)


def _rotary(fields: dict[str, Any], head_dim: int) -> tuple[float, int]:
    """rope_theta and the rotary width R; theta may sit at the top level in older configs."""
    rope = {} if "rope_theta" in fields else _need(fields, "rope_parameters")
    rope = fields.get("rope_parameters") or rope
    if not isinstance(rope, dict):
        raise ValueError("rope_parameters is not an object")
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_type {rope['rope_type']!r} is not supported")
    found = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    for source in (fields, rope):
        found.update({name: source[name] for name in found if name in source})
    factor = _positive(found, "partial_rotary_factor")
    width = round(head_dim * factor)
    if abs(width - head_dim * factor) > 1e-6 or width % 2 or not 0 < width <= head_dim:
        raise ValueError(f"partial_rotary_factor {factor} of head_dim {head_dim} gives no even width")
    return _positive(found, "rope_theta"), width


def _end_tokens(folder: Path, fields: dict[str, Any], vocab_size: int) -> frozenset[int]:
    """End tokens; ids outside the vocabulary can never be produced and are dropped."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    given = generation.get("eos_token_id")
    if given is None:
        given = _need(fields, "eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ValueError(f"eos_token_id must be an integer or a list of them, not {given!r}")
    return frozenset(i for i in ids if 0 <= i < vocab_size)

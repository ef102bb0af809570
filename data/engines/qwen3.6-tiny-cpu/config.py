"""Reads and checks config.json (two layouts) and the end tokens of a checkpoint."""

import json
from dataclasses import dataclass
from pathlib import Path

from .checks import boolean, integer, number

LINEAR, FULL = "linear_attention", "full_attention"
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
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
    """Dimensions of one model, under the names of config.json."""

    prefix: str  # of the text model's tensor names
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    end_tokens: frozenset[int]
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
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

    @property
    def key_dim(self) -> int:
        """Width of all key heads of a linear-attention layer side by side."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of all value heads of a linear-attention layer side by side."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: q, k and v."""
        return 2 * self.key_dim + self.value_dim


def read_json(path: Path) -> dict:
    """The object in a JSON file; ValueError names the file when it is absent or broken."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} does not hold an object")
    return found


def _field(fields: dict, name: str) -> object:
    """A field that must be there."""
    if name not in fields:
        raise ValueError(f"config.json lacks {name}")
    return fields[name]


def _text_fields(top: dict) -> tuple[dict, str]:
    """The text model's fields and the prefix of its tensors, for either layout."""
    kind = _field(top, "model_type")
    if kind == "qwen3_5_moe_text":
        return top, "model."
    if kind != "qwen3_5_moe":
        raise ValueError(f"model_type {kind!r} is of another family")
    text = _field(top, "text_config")
    if not isinstance(text, dict):
        raise ValueError("text_config must be an object")
    if _field(text, "model_type") != "qwen3_5_moe_text":
        raise ValueError(f"model_type {text['model_type']!r} of text_config is of another family")
    return text, "model.language_model."


def _refuse_variants(fields: dict) -> None:
    """What this engine does not compute is refused by the field's name."""
    fixed = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attn_output_gate": True,
        "output_gate_type": "swish",
        "rope_scaling": None,
    }
    for name, wanted in fixed.items():
        if name in fields and fields[name] != wanted:
            raise ValueError(f"{name} {fields[name]!r} is not supported")
    if fields.get("mlp_only_layers"):
        raise ValueError("mlp_only_layers must be empty")


def _layer_types(fields: dict, count: int) -> tuple[str, ...]:
    """One word per layer."""
    kinds = _field(fields, "layer_types")
    if not isinstance(kinds, list) or len(kinds) != count:
        raise ValueError(f"layer_types must list {count} layers")
    for kind in kinds:
        if kind not in (LINEAR, FULL):
            raise ValueError(f"layer_types holds {kind!r}")
    return tuple(kinds)


def _rope(fields: dict, head_dim: int) -> tuple[float, int]:
    """(theta, rotary width R), from rope_parameters or older top-level fields."""
    if "rope_parameters" not in fields and "rope_theta" not in fields:
        raise ValueError("config.json lacks rope_parameters")
    rope = fields.get("rope_parameters", {})
    if not isinstance(rope, dict):
        raise ValueError("rope_parameters must be an object")
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_type {rope['rope_type']!r} is not supported")
    theta = number("rope_theta", rope.get("rope_theta", fields.get("rope_theta", 10000)), 1.0)
    factor = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 0.25))
    width = head_dim * number("partial_rotary_factor", factor, 0.0, 1.0)
    if abs(width - round(width)) > 1e-6 or round(width) % 2:
        raise ValueError(f"partial_rotary_factor of head_dim gives a rotary width of {width}")
    return theta, round(width)


def _check_ratios(sizes: dict[str, int]) -> None:
    """Heads must divide, and no token can choose more experts than there are."""
    if sizes["num_attention_heads"] % sizes["num_key_value_heads"]:
        raise ValueError("num_key_value_heads does not divide num_attention_heads")
    if sizes["linear_num_value_heads"] % sizes["linear_num_key_heads"]:
        raise ValueError("linear_num_key_heads does not divide linear_num_value_heads")
    if sizes["num_experts_per_tok"] > sizes["num_experts"]:
        raise ValueError("num_experts_per_tok is above the number of experts")


def _end_tokens(folder: Path, fields: dict) -> frozenset[int]:
    """End tokens of generation_config.json, else of the config; null there means none."""
    path = folder / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.exists() else None
    if found is None:
        found = _field(fields, "eos_token_id")
    if found is None:
        return frozenset()
    many = found if isinstance(found, list) else [found]
    return frozenset(integer("eos_token_id", token, 0) for token in many)


def read_config(folder: Path) -> Config:
    """Config of the checkpoint in `folder`; ValueError names the field at fault."""
    top = read_json(folder / "config.json")
    fields, prefix = _text_fields(top)
    _refuse_variants(fields)
    sizes = {name: integer(name, _field(fields, name), 1) for name in SIZES}
    _check_ratios(sizes)
    theta, rotary_dim = _rope(fields, sizes["head_dim"])
    return Config(
        prefix=prefix,
        tie_word_embeddings=boolean("tie_word_embeddings", _field(top, "tie_word_embeddings")),
        layer_types=_layer_types(fields, sizes["num_hidden_layers"]),
        rms_norm_eps=number("rms_norm_eps", _field(fields, "rms_norm_eps"), 0.0),
        rope_theta=theta,
        rotary_dim=rotary_dim,
        end_tokens=_end_tokens(folder, fields),
        **sizes,
    )

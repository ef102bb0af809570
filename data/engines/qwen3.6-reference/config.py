"""`config.json` into `Config`; what this engine does not compute is refused by its field."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("linear_attention", "full_attention")
ALGORITHMS = {"W4A16_NVFP4": "nvfp4", "FP8": "fp8"}


@dataclass(frozen=True)
class Config:
    """Dimensions of the text model. prefix: of its tensors' names on disk; quantised: module (named
    as in the text model alone) -> 'nvfp4' or 'fp8'."""

    hidden_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
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
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    prefix: str
    quantised: dict[str, str]

    @property
    def key_dim(self) -> int:
        """Width of the DeltaNet's keys, all heads side by side."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of the DeltaNet's values, all heads side by side."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_dim + self.value_dim

    @classmethod
    def read(cls, folder: Path) -> "Config":
        """The config of a checkpoint folder; ValueError names the file or the field."""
        raw = _json(folder / "config.json")
        text = raw.get("text_config", raw)
        _refuse(text)
        prefix = "model.language_model." if "text_config" in raw else "model."
        rope = _need(text, "rope_parameters")
        counts = {name: _count(text, name) for name in cls.__annotations__ if name in COUNTS}
        _check_divisors(counts)
        return cls(
            **counts,
            layer_types=_layer_types(text),
            rotary_dim=_rotary_dim(counts["head_dim"], rope),
            rope_theta=float(_need(rope, "rope_theta")),
            rms_norm_eps=float(_need(text, "rms_norm_eps")),
            tie_word_embeddings=bool(_need(raw, "tie_word_embeddings")),
            eos_token_ids=_eos(text, folder),
            prefix=prefix,
            quantised=_quantised(raw.get("quantization_config"), prefix),
        )


COUNTS = frozenset(name for name, kind in Config.__annotations__.items() if kind is int) - {
    "rotary_dim"
}
DIVISORS = (
    ("num_key_value_heads", "num_attention_heads"),
    ("linear_num_key_heads", "linear_num_value_heads"),
)


def _refuse(text: dict[str, Any]) -> None:
    if _need(text, "model_type") != "qwen3_5_moe_text":
        raise ValueError(f"model_type: {text['model_type']!r} is not 'qwen3_5_moe_text'")
    wanted = {
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "output_gate_type": "swish",
        "mlp_only_layers": [],
    }
    for field, value in wanted.items():
        if text.get(field, value) != value:
            raise ValueError(f"{field}: {text[field]!r} is not {value!r}")
    kind = _need(text, "rope_parameters").get("rope_type", "default")
    if kind != "default":
        raise ValueError(f"rope_parameters: rope_type {kind!r} is not 'default'")


def _check_divisors(counts: dict[str, int]) -> None:
    for divisor, dividend in DIVISORS:
        if counts[dividend] % counts[divisor]:
            heads = counts[dividend]
            raise ValueError(f"{divisor}: {counts[divisor]} does not divide {heads} ({dividend})")
    if counts["num_experts_per_tok"] > counts["num_experts"]:
        raise ValueError(f"num_experts_per_tok: more than the {counts['num_experts']} experts")


def _layer_types(text: dict[str, Any]) -> tuple[str, ...]:
    layers, types = _count(text, "num_hidden_layers"), tuple(_need(text, "layer_types"))
    if len(types) != layers or not set(types) <= set(KINDS):
        raise ValueError(f"layer_types: {list(types)} are not {layers} of {KINDS}")
    return types


def _rotary_dim(head_dim: int, rope: dict[str, Any]) -> int:
    rotary = int(head_dim * rope.get("partial_rotary_factor", 0.25))
    if rotary % 2:
        raise ValueError(f"head_dim: {rotary} of {head_dim} dimensions rotate; RoPE rotates pairs")
    return rotary


def _quantised(quantisation: dict[str, Any] | None, prefix: str) -> dict[str, str]:
    if quantisation is None:
        return {}
    made = {}
    for module, how in _need(quantisation, "quantized_layers").items():
        if how.get("quant_algo") not in ALGORITHMS:
            raise ValueError(
                f"quantization_config: quant_algo {how.get('quant_algo')!r} of {module} "
                f"is none of {', '.join(ALGORITHMS)}"
            )
        made[module.replace(prefix, "model.", 1)] = ALGORITHMS[how["quant_algo"]]
    return made


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


def _count(raw: dict[str, Any], field: str) -> int:
    value = _need(raw, field)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{field}: {value!r} is not a positive integer")
    return value

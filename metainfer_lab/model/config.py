"""`ModelDims`: what a Hugging Face `config.json` says about a model, in one flat vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from metainfer_lab.errors import InputError
from metainfer_lab.hub import read_json
from metainfer_lab.model.quantisation import (
    SIDE_FILE,
    needs_side_file,
    quantised_layers,
    with_side_file,
)
from metainfer_lab.paths import MODELS

Family = Literal["llama", "qwen3", "qwen3_5_moe"]
LayerType = Literal["full_attention", "linear_attention"]
FAMILIES: dict[str, Family] = {
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
}


class Dims(BaseModel):
    """Dimensions never change, and every one of them is known."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class MoeDims(Dims):
    """Mixture of experts: `num_experts_per_tok` of `num_experts` run for a token, one always."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int


class GdnDims(Dims):
    """Gated DeltaNet: per value head a state of [key_head_dim, value_head_dim]."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: queries, keys and values side by side."""
        keys = self.num_key_heads * self.key_head_dim
        return 2 * keys + self.num_value_heads * self.value_head_dim


class VisionDims(Dims):
    """The vision tower, known by size and name only: text engines leave it on disk."""

    depth: int
    hidden_size: int
    intermediate_size: int
    out_hidden_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_position_embeddings: int


class ModelDims(Dims):
    """Dimensions of a language model; `moe`, `gdn`, `vision` are None where there are none."""

    name: str
    family: Family
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[LayerType, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int | None
    vocab_size: int
    rope_theta: float
    partial_rotary_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool
    attn_output_gate: bool
    eos_token_ids: tuple[int, ...]
    moe: MoeDims | None = None
    gdn: GdnDims | None = None
    vision: VisionDims | None = None
    mtp_layers: int = 0
    wrapped: bool = Field(default=False, description="tensors under model.language_model.")
    quantised_layers: dict[str, str] = Field(default={}, description="module -> format on disk")

    @classmethod
    def from_config(cls, source: str | Path | dict[str, Any], name: str | None = None) -> ModelDims:
        """Dimensions from a config.json, the folder that holds it, or its parsed content."""
        if isinstance(source, dict):
            return parse_config(source, name or "model")
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        config = _read_object(path)
        if needs_side_file(config):
            config = with_side_file(config, _read_object(path.with_name(SIDE_FILE)))
        return parse_config(config, name or path.resolve().parent.name)

    @classmethod
    def load(cls, model: str) -> ModelDims:
        """A shipped geometry by name, else a path, else a hub id (fetches no weights)."""
        if "/" not in model and (MODELS / model / "config.json").is_file():
            return cls.from_config(MODELS / model, name=model)
        if Path(model).exists():
            return cls.from_config(model)
        if model.count("/") == 1 and not model.startswith((".", "/")):
            config = read_json(model, "config.json")
            if needs_side_file(config):
                config = with_side_file(config, read_json(model, SIDE_FILE))
            return parse_config(config, model)
        shipped = ", ".join(sorted(path.parent.name for path in MODELS.glob("*/config.json")))
        raise InputError(f"model: {model!r} is no shipped geometry ({shipped}), path or hub id")

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that RoPE rotates."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def attention_layers(self) -> int:
        return self.layer_types.count("full_attention")

    @property
    def gdn_layers(self) -> int:
        return self.layer_types.count("linear_attention")

    def parameter_count(self) -> int:
        """Parameters of the whole checkpoint, vision and MTP included, a tied head once."""
        from metainfer_lab.model.tensors import inventory

        return sum(tensor.size for tensor in inventory(self))

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor on disk, in the layout that the config describes."""
        from metainfer_lab.model.layout import disk_tensors

        return {name: tensor.shape for name, tensor in disk_tensors(self).items()}


def parse_config(config: dict[str, Any], name: str) -> ModelDims:
    """Dimensions of a parsed config.json; an InputError names the field that it cannot accept."""
    text = config.get("text_config", config)
    family = FAMILIES.get(str(text.get("model_type", config.get("model_type"))))
    if family is None:
        kinds = ", ".join(sorted(FAMILIES))
        raise InputError(
            f"config.json: model_type: {text.get('model_type')!r} is not known; known are {kinds}"
        )
    _refuse_variants(text)
    heads = _need(text, "num_attention_heads")
    rope = text.get("rope_parameters") or {}
    return ModelDims(
        name=name,
        family=family,
        hidden_size=_need(text, "hidden_size"),
        num_hidden_layers=_need(text, "num_hidden_layers"),
        layer_types=_layer_types(text, family),
        num_attention_heads=heads,
        num_key_value_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or _need(text, "hidden_size") // heads,
        intermediate_size=None if family == "qwen3_5_moe" else _need(text, "intermediate_size"),
        vocab_size=_need(text, "vocab_size"),
        rope_theta=rope.get("rope_theta") or text.get("rope_theta") or 10_000.0,
        partial_rotary_factor=_partial_rotary(text, rope, family),
        rms_norm_eps=text.get("rms_norm_eps", 1e-6),
        max_position_embeddings=_need(text, "max_position_embeddings"),
        tie_word_embeddings=bool(
            config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        ),
        qk_norm=family != "llama",
        attn_output_gate=family == "qwen3_5_moe",
        eos_token_ids=_ids(text.get("eos_token_id", config.get("eos_token_id"))),
        moe=_moe(text) if family == "qwen3_5_moe" else None,
        gdn=_gdn(text) if family == "qwen3_5_moe" else None,
        vision=_vision(config.get("vision_config")),
        mtp_layers=text.get("mtp_num_hidden_layers", 0) if family == "qwen3_5_moe" else 0,
        wrapped="text_config" in config,
        quantised_layers=quantised_layers(config),
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give a config.json or its folder") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a JSON object; give a model's {path.name}")
    return value


def _need(config: dict[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json: {field}: {value!r} is not a positive integer; correct it")
    return value


def _refuse_variants(text: dict[str, Any]) -> None:
    """Refuse what would silently change the function that an engine has to compute."""
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    wanted = {
        "attention_bias": (bool(text.get("attention_bias")), False),
        "mlp_bias": (bool(text.get("mlp_bias")), False),
        "use_sliding_window": (bool(text.get("use_sliding_window")), False),
        "hidden_act": (text.get("hidden_act", "silu"), "silu"),
        "rope_parameters.rope_type": (kind, "default"),
    }
    for field, (value, needed) in wanted.items():
        if value != needed:
            raise InputError(
                f"config.json: {field}: {value!r} is not supported; only {needed!r} is understood"
            )


def _layer_types(text: dict[str, Any], family: Family) -> tuple[LayerType, ...]:
    count = _need(text, "num_hidden_layers")
    every = text.get("full_attention_interval", 4) if family == "qwen3_5_moe" else 1
    computed = tuple(
        "full_attention" if (layer + 1) % every == 0 else "linear_attention"
        for layer in range(count)
    )
    types = tuple(text.get("layer_types") or computed)
    if len(types) != count:
        raise InputError(
            f"config.json: layer_types: {len(types)} entries for {count} layers; give one a layer"
        )
    unknown = set(types) - ({"full_attention", "linear_attention"} if every > 1 else {types[0]})
    if unknown or (family != "qwen3_5_moe" and types[0] != "full_attention"):
        raise InputError(f"config.json: layer_types: {sorted(set(types))} is not known to {family}")
    return types


def _partial_rotary(text: dict[str, Any], rope: dict[str, Any], family: Family) -> float:
    default = 0.25 if family == "qwen3_5_moe" else 1.0
    return rope.get("partial_rotary_factor") or text.get("partial_rotary_factor") or default


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _moe(text: dict[str, Any]) -> MoeDims:
    return MoeDims(**{field: _need(text, field) for field in MoeDims.model_fields})


def _gdn(text: dict[str, Any]) -> GdnDims:
    names = {
        "num_key_heads": "linear_num_key_heads",
        "num_value_heads": "linear_num_value_heads",
        "key_head_dim": "linear_key_head_dim",
        "value_head_dim": "linear_value_head_dim",
        "conv_kernel": "linear_conv_kernel_dim",
    }
    return GdnDims(**{ours: _need(text, theirs) for ours, theirs in names.items()})


def _vision(config: dict[str, Any] | None) -> VisionDims | None:
    if config is None:
        return None
    renamed = {"in_channels": 3, "temporal_patch_size": 2, "num_position_embeddings": 2304}
    return VisionDims(
        **{
            field: config.get(field, renamed.get(field)) or _need(config, field)
            for field in VisionDims.model_fields
        }
    )

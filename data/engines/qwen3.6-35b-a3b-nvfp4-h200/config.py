"""Dimensions of the model, read from config.json and checked against this engine's granules."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Config:
    """Sizes of Qwen3.5/3.6 MoE text models; widths count elements."""

    hidden: int
    layer_types: tuple[str, ...]
    vocab: int
    rms_eps: float
    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int
    rope_theta: float
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    experts: int
    top_k: int
    expert_width: int
    shared_width: int
    max_positions: int
    eos_ids: tuple[int, ...]

    @property
    def conv_width(self) -> int:
        """Channels that pass through the causal convolution: q, k, v side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Rows of the fused projection: query and gate per head, then keys, then values."""
        return 2 * self.attention_width + 2 * self.kv_heads * self.head_dim


def read_config(folder: Path) -> Config:
    """Read `folder/config.json`; ValueError names the field that this engine cannot serve."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"checkpoint: {path} does not exist")
    outer = json.loads(path.read_text())
    text = outer.get("text_config", outer)
    if not str(text.get("model_type", "")).startswith("qwen3_5_moe"):
        raise ValueError(f"config.json: model_type {text.get('model_type')!r} is not qwen3_5_moe")
    rope = text["rope_parameters"]
    config = Config(
        hidden=text["hidden_size"],
        layer_types=tuple(_layer_types(text)),
        vocab=text["vocab_size"],
        rms_eps=text["rms_norm_eps"],
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        head_dim=text["head_dim"],
        rope_dim=int(text["head_dim"] * rope.get("partial_rotary_factor", 0.25)),
        rope_theta=float(rope["rope_theta"]),
        key_heads=text["linear_num_key_heads"],
        value_heads=text["linear_num_value_heads"],
        key_dim=text["linear_key_head_dim"],
        value_dim=text["linear_value_head_dim"],
        conv_kernel=text["linear_conv_kernel_dim"],
        experts=text["num_experts"],
        top_k=text["num_experts_per_tok"],
        expert_width=text["moe_intermediate_size"],
        shared_width=text["shared_expert_intermediate_size"],
        max_positions=text["max_position_embeddings"],
        eos_ids=_eos_ids(Path(folder), text),
    )
    _check(config, text)
    return config


def _layer_types(text: dict) -> list[str]:
    if text.get("layer_types"):
        return text["layer_types"]
    every = text.get("full_attention_interval", 4)
    return [
        "linear_attention" if (i + 1) % every else "full_attention"
        for i in range(text["num_hidden_layers"])
    ]


def _eos_ids(folder: Path, text: dict) -> tuple[int, ...]:
    """generation_config.json knows the chat end token too; config.json is used without it."""
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text()) if path.is_file() else {}
    ids = generation.get("eos_token_id", text.get("eos_token_id"))
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _check(config: Config, text: dict) -> None:
    if text.get("tie_word_embeddings"):
        raise ValueError("config.json: tie_word_embeddings must be false (the head is NVFP4)")
    if len(config.layer_types) != text["num_hidden_layers"]:
        raise ValueError("config.json: layer_types and num_hidden_layers disagree")
    if config.conv_kernel != 4:
        raise ValueError("config.json: linear_conv_kernel_dim must be 4")
    for name in ("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if text[name] % 16:
            raise ValueError(f"config.json: {name} must be a multiple of 16 (one NVFP4 block)")
    if config.value_heads % config.key_heads:
        raise ValueError("config.json: linear_num_value_heads must be a multiple of the key heads")
    if config.heads % config.kv_heads:
        raise ValueError("config.json: num_attention_heads must be a multiple of the KV heads")

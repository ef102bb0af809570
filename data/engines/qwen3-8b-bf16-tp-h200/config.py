"""Dimensions of a Qwen3 checkpoint, from its config.json."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

PAGE = 64  # tokens behind one KV page
MAX_BATCH = 32  # rows of the decode products
GRANULES = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 128, "vocab_size": 4}


@dataclass(frozen=True)
class ModelConfig:
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Reads config.json, and the end ids from generation_config.json where it has them.

        ValueError names a field that is missing or not supported.
        """
        if not (folder / "config.json").is_file():
            raise ValueError(f"checkpoint: {folder} has no config.json")
        config = json.loads((folder / "config.json").read_text())
        _refuse_other_models(config)
        generation = folder / "generation_config.json"
        if generation.exists():
            ends = json.loads(generation.read_text()).get("eos_token_id")
            config = config if ends is None else config | {"eos_token_id": ends}
        names = [name for name in cls.__dataclass_fields__ if name in config]
        fields = {name: config[name] for name in names}
        fields["rope_theta"] = _rope_theta(config)
        fields["eos_token_ids"] = _as_ids(config.get("eos_token_id"))
        fields.setdefault("tie_word_embeddings", False)
        fields.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        missing = [name for name in cls.__dataclass_fields__ if name not in fields]
        if missing:
            raise ValueError(f"config.json lacks {missing[0]}")
        return cls(**fields)

    @property
    def qkv_size(self) -> int:
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim

    def shard(self, world: int) -> Self:
        """What one of `world` ranks computes: its heads, its part of the intermediate size.

        vocab_size stays the model's. ValueError names the dimension that does not divide.
        """
        for name in ("num_attention_heads", "intermediate_size", "vocab_size"):
            if getattr(self, name) % world:
                raise ValueError(f"config.json: {name} must be a multiple of world, {world}")
        kv_heads = self.num_key_value_heads
        if kv_heads % world and world % kv_heads:
            raise ValueError(f"config.json: num_key_value_heads {kv_heads} against world {world}")
        return replace(
            self,
            num_attention_heads=self.num_attention_heads // world,
            num_key_value_heads=max(1, kv_heads // world),
            intermediate_size=self.intermediate_size // world,
        )

    def check_granules(self) -> None:
        """The kernels' tiles, of one rank's sizes; ValueError names what does not fit."""
        for name, granule in GRANULES.items():
            value = getattr(self, name)
            if value % granule or (name == "head_dim" and value != granule):
                raise ValueError(
                    f"config.json: {name} {value} must be a multiple of {granule} on a GPU"
                )
        if self.num_attention_heads > 8 * self.num_key_value_heads:
            raise ValueError(
                "config.json: num_attention_heads may be at most 8 times num_key_value_heads"
            )


def _refuse_other_models(config: dict) -> None:
    expected = {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
    }
    for name, value in expected.items():
        if config.get(name, value) != value:
            raise ValueError(
                f"config.json: {name} is {config[name]!r}, this engine holds {value!r}"
            )
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        raise ValueError(
            "config.json: num_attention_heads must be a multiple of num_key_value_heads"
        )
    if config["hidden_size"] % 32:
        raise ValueError("config.json: hidden_size must be a multiple of 32")


def _rope_theta(config: dict) -> float:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"config.json: rope type {rope} is not supported, only default")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json lacks rope_theta")
    return float(theta)


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)

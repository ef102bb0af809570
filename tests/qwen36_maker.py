"""A tiny random Qwen3.6 checkpoint, quantised in ModelOpt's layout, and its exact values.

Written apart from the package's own maker, so that one fault does not hide in both.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parents[1] / "data/engines/qwen3.6-35b-a3b-nvfp4-h200"
TOLERANCE = 1e-5

TINY = {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "vocab_size": 304,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "eos_token_id": 303,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])


FULL_SIZES = "data/models/qwen3.6-35b-a3b-nvfp4"


def load_package():
    """Import the engine folder as the package `engine_qwen36`."""
    name = "engine_qwen36"
    if name not in sys.modules:
        where = [str(FOLDER)]
        spec = importlib.util.spec_from_file_location(
            name, FOLDER / "__init__.py", submodule_search_locations=where
        )
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def quantise_fp8(weight):
    scale = weight.abs().amax() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def quantise_nvfp4(weight):
    total = weight.abs().amax() / (6 * 448)
    blocks = weight.unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1) / 6 / total).clamp_min(2**-9).to(torch.float8_e4m3fn)
    scaled = blocks / (scale.float() * total)[..., None]
    index = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    values = E2M1[index] * scaled.sign() * (scale.float() * total)[..., None]
    codes = (index + 8 * (scaled < 0)).flatten(-2).to(torch.uint8)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": total}
    return tensors, values.flatten(-2)


class Maker:
    """Random tensors, stored twice: quantised for the engine, exact for the oracle."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.stored, self.exact = {}, {}

    def plain(self, name, *shape, scale=0.05, offset=0.0):
        value = (torch.randn(shape, generator=self.random) * scale + offset).bfloat16()
        self.stored["model.language_model." + name] = value
        self.exact["model." + name] = value.float()

    def quantised(self, name, rows, cols, quantise, scale=0.12):
        tensors, values = quantise(torch.randn(rows, cols, generator=self.random) * scale)
        prefix = "" if name == "lm_head" else "model.language_model."
        tensors["input_scale"] = torch.tensor(1.0)  # unused: activations are not quantised
        self.stored.update({f"{prefix}{name}.{key}": value for key, value in tensors.items()})
        return values

    def linear(self, name, rows, cols, quantise):
        prefix = "" if name == "lm_head" else "model."
        self.exact[f"{prefix}{name}.weight"] = self.quantised(name, rows, cols, quantise)


def fill_gdn(maker, name, c):
    heads, hidden = c["linear_num_value_heads"], c["hidden_size"]
    keys, values = c["linear_num_key_heads"] * 32, heads * 32
    maker.linear(name + "in_proj_qkv", 2 * keys + values, hidden, quantise_fp8)
    maker.linear(name + "in_proj_z", values, hidden, quantise_fp8)
    maker.linear(name + "out_proj", hidden, values, quantise_fp8)
    maker.plain(name + "in_proj_a.weight", heads, hidden, scale=0.1)
    maker.plain(name + "in_proj_b.weight", heads, hidden, scale=0.1)
    maker.plain(name + "conv1d.weight", 2 * keys + values, 1, 4, scale=0.4)
    maker.plain(name + "A_log", heads, scale=0.5)
    maker.plain(name + "dt_bias", heads, scale=0.5)
    maker.plain(name + "norm.weight", 32, offset=1.0)


def fill_attention(maker, name, c):
    width, kv = c["num_attention_heads"] * 32, c["num_key_value_heads"] * 32
    hidden = c["hidden_size"]
    rows = {"q_proj": 2 * width, "k_proj": kv, "v_proj": kv}
    for part, count in rows.items():
        maker.linear(name + part, count, hidden, quantise_fp8)
    maker.linear(name + "o_proj", hidden, width, quantise_fp8)
    maker.plain(name + "q_norm.weight", 32)
    maker.plain(name + "k_norm.weight", 32)


def fill_moe(maker, name, c):
    hidden, width = c["hidden_size"], c["moe_intermediate_size"]
    maker.plain(name + "gate.weight", c["num_experts"], hidden, scale=0.2)
    maker.plain(name + "shared_expert_gate.weight", 1, hidden, scale=0.2)
    shapes = {
        "gate_proj": (width, hidden),
        "up_proj": (width, hidden),
        "down_proj": (hidden, width),
    }
    for part, shape in shapes.items():
        maker.linear(f"{name}shared_expert.{part}", *shape, quantise_nvfp4)
    experts = {
        part: torch.stack(
            [
                maker.quantised(f"{name}experts.{e}.{part}", *shape, quantise_nvfp4)
                for e in range(c["num_experts"])
            ]
        )
        for part, shape in shapes.items()
    }
    gate_up = torch.cat((experts["gate_proj"], experts["up_proj"]), 1)
    maker.exact[f"model.{name}experts.gate_up_proj"] = gate_up
    maker.exact[f"model.{name}experts.down_proj"] = experts["down_proj"]


def make_checkpoint(folder, seed, c=TINY):
    """Write a ModelOpt checkpoint; return the oracle's exact state dict."""
    maker = Maker(seed)
    maker.plain("embed_tokens.weight", c["vocab_size"], c["hidden_size"], scale=1.0)
    for i, kind in enumerate(c["layer_types"]):
        name = f"layers.{i}."
        maker.plain(name + "input_layernorm.weight", c["hidden_size"])
        maker.plain(name + "post_attention_layernorm.weight", c["hidden_size"])
        if kind == "linear_attention":
            fill_gdn(maker, name + "linear_attn.", c)
        else:
            fill_attention(maker, name + "self_attn.", c)
        fill_moe(maker, name + "mlp.", c)
    maker.plain("norm.weight", c["hidden_size"])
    maker.linear("lm_head", c["vocab_size"], c["hidden_size"], quantise_nvfp4)
    maker.stored["mtp.fc.weight"] = torch.zeros(4)
    save_file({k: v.contiguous() for k, v in maker.stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(c))
    return maker

"""Small random checkpoints of the Qwen3.5/3.6 hybrid in true Hugging Face layout, from a seed.

`tiny_qwen36` makes them plain or in ModelOpt's mixed NVFP4 and FP8; `truncated` cuts one after some
layers, which finds the first layer that departs; `shallow_config` keeps a model's full width.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from metainfer_lab.checkpoints import draws, modelopt
from metainfer_lab.checkpoints.tiny import write_tensors
from metainfer_lab.checkpoints.variants import read_tensors
from metainfer_lab.model import ModelDims
from metainfer_lab.model.tensors import text_prefix

if TYPE_CHECKING:
    import torch

PATTERN = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
CALIBRATION_PROMPTS, CALIBRATION_TOKENS = 4, 48


class Calibrator(Protocol):
    """What makers of quantised checkpoints need of `metainfer_lab.oracle.Oracle`."""

    def use(self, checkpoint: Path, dtype: Literal["float32", "float64"]) -> None:
        """Answer for this checkpoint from now on."""

    def input_amax(self, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Largest |input| of each linear module over some prompts."""


def tiny_qwen36(
    seed: int,
    folder: Path,
    *,
    quantised: bool = False,
    wrapped: bool = True,
    shards: int = 2,
    oracle: Calibrator | None = None,
    granules: Mapping[str, int] | None = None,
    **dims: Any,
) -> Path:
    """Write a checkpoint; fields that `dims` does not fix are drawn within `granules`.

    wrapped: as published, the text model within a multimodal one, whose vision and multi-token
    prediction tensors are there too. quantised: always wrapped, bf16 where it is not quantised,
    and the input scales come from a forward pass of `oracle`, which must be there then.
    The same arguments give the same bytes.
    """
    rng = np.random.default_rng(seed)
    text = draws.draw_dims(rng, dict(granules or {}), quantised=quantised, **dims)
    config = tiny_config(text, wrapped=wrapped or quantised)
    tensors = draw_tensors(config, seed)
    if not quantised:
        return write(folder, config, tensors, shards)
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    amax = calibrate(config, tensors, rng, oracle)
    quantised_tensors = modelopt.quantise(tensors, ModelDims.from_config(config), amax, rng)
    return write(folder, modelopt.quantised_config(config), quantised_tensors, shards)


def tiny_config(text: Mapping[str, Any], *, wrapped: bool) -> dict[str, Any]:
    """config.json of given text dimensions: the text model's own, or that of the multimodal one."""
    inner, rotary = dict(text), text["head_dim"] // 4
    kinds = inner.get("layer_types") or [PATTERN[i % 4] for i in range(inner["num_hidden_layers"])]
    heights = rotary // 6  # rotary pairs of the image axes; for text all axes are equal
    config = {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": int(wrapped),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": inner.pop("rope_theta"),
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [rotary // 2 - 2 * heights, heights, heights],
        },
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "dtype": "float32",
        **inner,
        "layer_types": list(kinds),
        "num_hidden_layers": len(kinds),
    }
    return _wrapped(config) if wrapped else config


def _wrapped(text: dict[str, Any]) -> dict[str, Any]:
    del text["architectures"]
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 2,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 16,
        "out_hidden_size": text["hidden_size"],
        "model_type": "qwen3_5_moe",
    }
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vision_config": vision,
    }


def draw_tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """float32 tensors of an unquantised config, by name."""
    import torch

    dims = ModelDims.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    residual = draws.residual_share(2 * 4)  # also of shorter ones, which are cut from four layers
    return {
        name: draws.draw(name, shape, dims, generator, residual)
        for name, shape in dims.tensors().items()
    }


def write(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], shards: int
) -> Path:
    """config.json and what goes with it, and safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)
    write_tensors(folder, tensors, shards)
    return folder


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """config.json, generation_config.json and, if quantised, hf_quant_config.json."""
    ends = config.get("text_config", config)["eos_token_id"]
    files = {"config.json": config, "generation_config.json": {"eos_token_id": ends}}
    if "quantization_config" in config:
        files["hf_quant_config.json"] = modelopt.hf_quant_config(config)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))


def calibrate(
    config: dict[str, Any],
    tensors: Mapping[str, torch.Tensor],
    rng: np.random.Generator,
    oracle: Calibrator | None,
) -> dict[str, float]:
    """Largest |input| of each linear module over random prompts, by the unquantised model."""
    if oracle is None:
        raise ValueError("oracle: a quantised checkpoint is calibrated by one")
    vocab = config.get("text_config", config)["vocab_size"]
    prompts = rng.integers(0, vocab, (CALIBRATION_PROMPTS, CALIBRATION_TOKENS)).tolist()
    with tempfile.TemporaryDirectory() as scratch:
        source = write(Path(scratch) / "source", config, tensors, shards=1)
        oracle.use(source, "float32")
        return oracle.input_amax(prompts)


def truncated(source: Path, folder: Path, layers: int) -> Path:
    """A copy that ends after its first `layers` layers: same weights, one norm, one head."""
    config = json.loads((source / "config.json").read_text())
    whole = ModelDims.from_config(config)
    text = config.get("text_config", config)
    text["num_hidden_layers"], text["layer_types"] = layers, text["layer_types"][:layers]
    cut = tuple(f"{text_prefix(whole)}layers.{n}." for n in range(layers, whole.num_hidden_layers))
    if quantisation := config.get("quantization_config"):
        modules = quantisation["quantized_layers"]
        kept = {name: how for name, how in modules.items() if not name.startswith(cut)}
        quantisation["quantized_layers"] = kept
    tensors = {
        name: tensor for name, tensor in read_tensors(source).items() if not name.startswith(cut)
    }
    return write(folder, config, tensors, shards=1)


def shallow_config(config: Mapping[str, Any], layer_types: Sequence[str]) -> dict[str, Any]:
    """A model's config with few layers of the given kinds, everything else at full width."""
    made = json.loads(json.dumps(config))
    text = made.get("text_config", made)
    text["num_hidden_layers"], text["layer_types"] = len(layer_types), list(layer_types)
    if "quantization_config" in made:
        del made["quantization_config"]
        return modelopt.quantised_config(made)
    return made

"""ModelOpt's map of quantised modules, from config.json or from hf_quant_config.json beside it."""

from __future__ import annotations

import re
from typing import Any

from metainfer_lab.errors import InputError

SIDE_FILE = "hf_quant_config.json"
FORMATS = {"W4A16_NVFP4": "nvfp4", "NVFP4": "nvfp4", "FP8": "fp8"}


def needs_side_file(config: dict[str, Any]) -> bool:
    """Whether a config says that it is quantised and leaves the map to the other file."""
    quantised = config.get("quantization_config") or {}
    return quantised.get("quant_method") == "modelopt" and "quantized_layers" not in quantised


def with_side_file(config: dict[str, Any], side: dict[str, Any]) -> dict[str, Any]:
    """The config with the map of hf_quant_config.json in its place."""
    layers = side.get("quantization", {}).get("quantized_layers", {})
    quantised = config["quantization_config"] | {"quantized_layers": layers}
    return config | {"quantization_config": quantised}


def quantised_layers(config: dict[str, Any]) -> dict[str, str]:
    """Module -> storage format of a config's `quantization_config`; {} for an unquantised one.

    Names are brought to transformers' form; the projections of a layer's experts are one module.
    """
    quantised = config.get("quantization_config") or {}
    layers = quantised.get("quantized_layers", {})
    if quantised and not layers:
        raise InputError(
            f"config.json: quantization_config: {quantised.get('quant_method')!r} names no "
            "quantized_layers; only ModelOpt's mixed-precision map is understood"
        )
    unknown = {item.get("quant_algo") for item in layers.values()} - set(FORMATS)
    if unknown:
        raise InputError(
            f"config.json: quantization_config: quant_algo {sorted(map(str, unknown))} is not "
            f"known; known are {', '.join(FORMATS)}"
        )
    return {_module(name): FORMATS[item["quant_algo"]] for name, item in layers.items()}


def _module(name: str) -> str:
    name = re.sub(r"^language_model\.(model\.)?(?=layers\.)", "model.language_model.", name)
    name = re.sub(r"^language_model\.(?=lm_head$)", "", name)
    return re.sub(r"\.mlp\.experts\.\d+\.\w+$", ".mlp.experts", name)

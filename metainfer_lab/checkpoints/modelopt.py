"""ModelOpt's mixed-precision layout, as NVIDIA publishes Qwen3.6-35B-A3B in it.

Routed experts, shared experts and the head are W4A16 NVFP4; projections of attention and of Gated
DeltaNet are per-tensor FP8; the rest stays bf16. Experts are stored one by one, and each quantised
module has its scales beside its weight (`metainfer_lab.model.layout` lists the names).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metainfer_lab.checkpoints import fp8, nvfp4
from metainfer_lab.checkpoints.tiny import write_tensors
from metainfer_lab.checkpoints.variants import read_tensors
from metainfer_lab.model import ModelDims
from metainfer_lab.model.layout import SCHEMES
from metainfer_lab.model.tensors import Tensor as Parameter
from metainfer_lab.model.tensors import inventory, text_prefix

if TYPE_CHECKING:
    import numpy as np
    import torch

ALGORITHMS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_algo": "FP8"},
    "nvfp4": {"quant_algo": "W4A16_NVFP4", "group_size": nvfp4.BLOCK},
}
NVFP4_PARTS = ("weight", "weight_scale", "weight_scale_2")  # of a module; beside an input_scale
Quantised = fp8.Fp8 | nvfp4.Nvfp4
# By how many powers of two a global scale exceeds amax / (6 · 448), drawn for each NVFP4 tensor: at
# 17 its block scales are E4M3's least, 2^-9 and a few times that.
SHIFTS = (0, 0, 0, 0, 4, 8, 12, 17)


def quantised_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the `quantization_config` of the mix."""
    layers = {
        module: ALGORITHMS[form]
        for module, form in mixed_layers(ModelDims.from_config(dict(config))).items()
    }
    quantisation = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }
    made = json.loads(json.dumps(config))
    made.get("text_config", made)["dtype"] = "bfloat16"
    return made | {"quantization_config": quantisation}


def mixed_layers(dims: ModelDims) -> dict[str, str]:
    """Module -> format of the mix; the experts of a layer are one module."""
    return {
        parameter.module: SCHEMES["nvfp4-mix"][parameter.role]
        for parameter in inventory(dims)
        if parameter.role in SCHEMES["nvfp4-mix"]
    }


def hf_quant_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """hf_quant_config.json: the same map, the kv cache's format, and who made it."""
    given = config["quantization_config"]
    quantisation = {"kv_cache_quant_algo": None, "exclude_modules": ["mtp*", "model.visual*"]}
    quantisation |= {key: given[key] for key in ("quant_algo", "quantized_layers")}
    return {"producer": {"name": "metainfer_lab", "version": "1"}, "quantization": quantisation}


def quantise(
    tensors: Mapping[str, torch.Tensor],
    dims: ModelDims,
    amax: Mapping[str, float],
    rng: np.random.Generator,
    shifts: Sequence[int] = SHIFTS,
) -> dict[str, torch.Tensor]:
    """Tensors of the mixed layout from those of the plain one (experts fused).

    amax: module (named as in the text model alone) -> largest |input|. NVFP4 global scales are
    shifted, so that block scales take E4M3's whole range; the least ones cost precision.
    """
    made, layers = dict(tensors), mixed_layers(dims)
    for parameter in inventory(dims):
        form = layers.get(parameter.module)
        for module, rows, expert in parameter.parts() if form else ():
            made.pop(parameter.name, None)
            weight = tensors[parameter.name]
            weight = weight if expert is None else weight[expert, rows]
            bound = amax[module.replace(text_prefix(dims), "model.", 1)]
            shift = int(rng.choice(shifts)) if form == "nvfp4" else 0
            made |= {f"{module}.{k}": v for k, v in stored(weight, form, bound, shift).items()}
    return made


def stored(weight: torch.Tensor, form: str, amax: float, shift: int = 0) -> dict[str, torch.Tensor]:
    """A quantised weight's tensors on disk, by what follows the module's name."""
    import torch

    if form == "fp8":
        made = fp8.quantise(weight)
        scale = torch.tensor(amax / nvfp4.E4M3_MAX)
        return {"weight": made.codes, "weight_scale": made.scale, "input_scale": scale}
    made4 = nvfp4.quantise(weight, nvfp4.default_global_scale(weight) * 2.0**shift)
    return {
        "weight": made4.codes,
        "weight_scale": made4.block_scale,
        "weight_scale_2": made4.global_scale,
        "input_scale": torch.tensor(amax / (nvfp4.E2M1_MAX * nvfp4.E4M3_MAX)),
    }


def dequantise(
    tensors: Mapping[str, torch.Tensor],
    dims: ModelDims,
    dtype: torch.dtype,
    wanted: Callable[[Parameter], bool] = lambda parameter: True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the text model in the plain layout, experts fused; exact in float64.

    Tensors that are not quantised keep their dtype.
    """
    for name, form in stacked(tensors, dims, wanted):
        yield name, form.dequantise(dtype) if isinstance(form, Quantised) else form


def stacked(
    tensors: Mapping[str, torch.Tensor],
    dims: ModelDims,
    wanted: Callable[[Parameter], bool] = lambda parameter: True,
) -> Iterator[tuple[str, torch.Tensor | fp8.Fp8 | nvfp4.Nvfp4]]:
    """(name, values as they are stored) of the text model in the plain layout, experts together.

    dims: of the quantised config; wanted: which parameters to read. Reads only what a parameter
    needs: `tensors` may be a mapping that opens files.
    """
    for parameter in inventory(dims):
        form, module = dims.quantised_layers.get(parameter.module), parameter.module
        if parameter.role in ("vision", "mtp") or not wanted(parameter):
            continue
        if form is None:
            yield parameter.name, tensors[parameter.name]
        elif form == "fp8":
            codes, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
            yield parameter.name, fp8.Fp8(codes, scale)
        elif parameter.role != "routed_experts":
            parts = (tensors[f"{module}.{key}"] for key in NVFP4_PARTS)
            yield parameter.name, nvfp4.Nvfp4(*parts)
        else:
            yield parameter.name, _experts(tensors, parameter)


def _experts(tensors: Mapping[str, torch.Tensor], parameter: Parameter) -> nvfp4.Nvfp4:
    """The matrices [experts, rows, in] of all experts at once: one by one takes minutes."""
    import torch

    parts: list[list[torch.Tensor]] = []
    for projection, rows in parameter.projections.items():
        named = f"{parameter.module}.{{}}.{projection}.{{}}".format
        codes, scale, whole = (
            torch.stack([tensors[named(i, key)] for i in range(parameter.shape[0])])
            for key in NVFP4_PARTS
        )
        count = rows.stop - rows.start
        parts.append([codes, scale, whole[:, None, None].expand(-1, count, 1)])
    return nvfp4.Nvfp4(*(torch.cat(part, dim=1) for part in zip(*parts, strict=True)))


def dequantised_checkpoint(source: Path, folder: Path) -> Path:
    """A plain float64 copy of a quantised checkpoint, of exactly the values it stands for.

    This is what the oracle reads; vision and multi-token prediction are left out.
    """
    import torch

    config = json.loads((source / "config.json").read_text())
    values = dequantise(read_tensors(source), ModelDims.from_config(config), torch.float64)
    text = {name: tensor.double() for name, tensor in values}
    del config["quantization_config"]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shutil.copyfile(source / "generation_config.json", folder / "generation_config.json")
    write_tensors(folder, text)
    return folder

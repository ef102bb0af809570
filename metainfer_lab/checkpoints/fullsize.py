"""Full-size checkpoints from a seed: straight into a GPU's memory, or shard by shard into a folder.

For speed and for kernels at full width; what such a model says means nothing. Each tensor has its
own random stream, named by seed and tensor, so that a few layers can be made without the others and
are the same. CPU and CUDA draw different numbers from the same seed.

NVFP4 codes are drawn as they are stored, all sixteen alike, with block scales of one of four
ranges and the global scale that gives the weights their size. At 32 random streams about 160 of 256
experts of a layer are touched in a step (40 layers at an eighth of the width: 160.1 in the mean
over six steps, 154 in the least layer; 163 if all experts were alike).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metainfer_lab.checkpoints import draws, modelopt, nvfp4
from metainfer_lab.model import ModelDims
from metainfer_lab.model.tensors import Tensor as Parameter
from metainfer_lab.model.tensors import inventory

if TYPE_CHECKING:
    import torch

    Named = Iterator[tuple[str, torch.Tensor]]

# First byte of sixteen E4M3 values from which a matrix draws its block scales: 2^-9 .. 2^-5,
# 1/8 .. 15/32, 2 .. 7.5 and 112 .. 416.
SCALE_BYTES = (0x01, 0x20, 0x40, 0x6E)
# Largest |input| of a module, by the end of its name: of 1,024 tokens through four layers of half
# the width, and a tenth more.
INPUT_AMAX = {"o_proj": 4.1, "out_proj": 29.0, "down_proj": 31.0, "lm_head": 5.9, "": 9.2}
SHARD_BYTES = 4 << 30


def tensors(
    config: Mapping[str, Any],
    seed: int,
    device: str = "cpu",
    *,
    layers: Collection[int] | None = None,
    text_only: bool = True,
    to_host: bool = False,
) -> Named:
    """(name on disk, tensor) of a checkpoint of this config.json, bf16 where it is not quantised.

    layers: those to make (others are left out; what belongs to no layer is always made). text_only:
    without vision and multi-token prediction. An expert's tensors are views of its layer's;
    to_host: these leave the device together, for one by one 120,000 copies take minutes.
    """
    dims = ModelDims.from_config(dict(config))
    residual = draws.residual_share(2 * dims.num_hidden_layers)
    for parameter in inventory(dims):
        if text_only and parameter.role in ("vision", "mtp"):
            continue
        if layers is not None and parameter.layer is not None and parameter.layer not in layers:
            continue
        yield from _parameter(parameter, dims, seed, device, residual, to_host)


def write(
    config: Mapping[str, Any],
    seed: int,
    folder: Path,
    device: str = "cpu",
    shard_bytes: int = SHARD_BYTES,
    text_only: bool = False,
) -> Path:
    """Write the whole checkpoint; no more than a shard and a layer's experts in memory."""
    from metainfer_lab.checkpoints.tiny_qwen36 import write_config

    folder.mkdir(parents=True)
    write_config(folder, config)
    weight_map: dict[str, str] = {}
    total, shard, size = 0, {}, 0
    for name, tensor in tensors(config, seed, device, text_only=text_only, to_host=True):
        if shard and size + tensor.nbytes > shard_bytes:
            _save(shard, folder, weight_map)
            shard, size = {}, 0
        shard[name] = tensor.cpu() if tensor.ndim else tensor.cpu().clone()  # gate and up share one
        size, total = size + tensor.nbytes, total + tensor.nbytes
    _save(shard, folder, weight_map)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _save(shard: dict[str, torch.Tensor], folder: Path, weight_map: dict[str, str]) -> None:
    from safetensors.torch import save_file

    file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
    save_file(shard, folder / file, metadata={"format": "pt"})
    weight_map |= dict.fromkeys(shard, file)


def _parameter(
    parameter: Parameter,
    dims: ModelDims,
    seed: int,
    device: str,
    residual: float,
    to_host: bool,
) -> Named:
    import torch

    name, shape = parameter.name, parameter.shape
    module = parameter.module
    form = dims.quantised_layers.get(module)
    generator = _generator(seed, name, device)
    if form == "nvfp4":
        weights = _nvfp4(shape, draws.spread(name, shape, dims, residual), generator)
        if to_host:
            parts = (weights.codes, weights.block_scale, weights.global_scale)
            weights = nvfp4.Nvfp4(*(part.cpu() for part in parts))
        for part, rows, expert in parameter.parts():
            yield from _nvfp4_tensors(part, weights, rows, expert)
        return
    weight = draws.draw(name, shape, dims, generator, residual, device)
    if form == "fp8":
        stored = modelopt.stored(weight, "fp8", _input_amax(module))
        yield from ((f"{module}.{key}", tensor.to(device)) for key, tensor in stored.items())
    else:
        yield name, weight.to(torch.bfloat16)


def _nvfp4(shape: tuple[int, ...], spread: float, generator: torch.Generator) -> nvfp4.Nvfp4:
    """Random codes [..., K/2] and block scales [..., K/16], and a global scale for each matrix."""
    import torch

    device, matrices = generator.device, shape[:-2]
    *rows, width = shape

    def integers(low: int, high: int, size: tuple[int, ...]) -> torch.Tensor:
        kind = {"generator": generator, "device": device, "dtype": torch.uint8}
        return torch.randint(low, high, size, **kind)

    codes = integers(0, 256, (*rows, width // 2))
    first = torch.tensor(SCALE_BYTES, dtype=torch.uint8, device=device)
    first = first[integers(0, len(SCALE_BYTES), matrices).long()]
    scale_bytes = integers(0, 16, (*rows, width // nvfp4.BLOCK)) + first[..., None, None]
    span = torch.arange(16, dtype=torch.uint8, device=device) + first[..., None]
    scale_size = span.view(torch.float8_e4m3fn).float().square().mean(-1).sqrt()
    code_size = math.sqrt(sum(value**2 for value in nvfp4.E2M1) / len(nvfp4.E2M1))
    global_scale = spread / (code_size * scale_size)
    return nvfp4.Nvfp4(codes, scale_bytes.view(torch.float8_e4m3fn), global_scale)


def _nvfp4_tensors(
    module: str, weights: nvfp4.Nvfp4, rows: slice, expert: int | None
) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    one = ... if expert is None else expert
    device = weights.codes.device
    amax = _input_amax(module) / (nvfp4.E2M1_MAX * nvfp4.E4M3_MAX)
    yield f"{module}.weight", weights.codes[one][rows]
    yield f"{module}.weight_scale", weights.block_scale[one][rows]
    yield f"{module}.weight_scale_2", weights.global_scale[one]
    yield f"{module}.input_scale", torch.tensor(amax, device=device)


def _input_amax(module: str) -> float:
    return next(amax for end, amax in INPUT_AMAX.items() if module.endswith(end))


def _generator(seed: int, name: str, device: str) -> torch.Generator:
    import torch

    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8]) >> 1)

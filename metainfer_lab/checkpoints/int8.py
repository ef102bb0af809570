"""The int8 scheme of `precision.weights: int8`: symmetric, one scale per output channel.

For a weight W [out, in]: scale[o] = max_i |W[o, i]| / 127 in float32 (1 where the row is zero) and
q[o, i] = round_half_even(W[o, i] / scale[o]), an int8 in [-127, 127]; the weight that the engine
computes with is q * scale. All linear layers and the head are quantised; a tied embedding is looked
up in the head's dequantised rows; norms stay float32.
"""

from __future__ import annotations

from pathlib import Path

import torch


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(q int8 [out, in], scale float32 [out]) of a weight [out, in] of any float dtype."""
    weight = weight.float()
    scale = weight.abs().amax(dim=1) / 127
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return torch.round(weight / scale[:, None]).to(torch.int8), scale


def dequantise(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [out, in] of int8 codes [out, in] and scales [out]."""
    return codes.float() * scale[:, None]


def is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the scheme covers a tensor: every matrix; norms are vectors."""
    return len(shape) == 2 and name.endswith(".weight")


def dequantised_checkpoint(source: Path, folder: Path) -> Path:
    """Copy a checkpoint with each covered weight replaced by its dequantised int8 form.

    This is what the oracle reads: the very weights that an int8 engine computes with, in float32.
    """
    import shutil

    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
            continue
        tensors = {
            name: dequantise(*quantise(tensor))
            if is_quantised(name, tuple(tensor.shape))
            else tensor
            for name, tensor in load_file(path).items()
        }
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
    return folder

"""Checkpoints made from another: perturbed, silenced, and bad ones that must be refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from metainfer_lab.checkpoints.tiny import write_tensors

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]


def read_tensors(folder: Path) -> Tensors:
    """All tensors of a checkpoint folder, sharded or not."""
    from safetensors.torch import load_file

    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def edited(source: Path, folder: Path, edit: Callable[[Tensors], None], shards: int = 1) -> Path:
    """A copy of a checkpoint after `edit` has changed its tensors in place."""
    tensors = read_tensors(source)
    edit(tensors)
    folder.mkdir(parents=True)
    for path in source.glob("*.json"):
        if not path.name.endswith("index.json"):
            shutil.copyfile(path, folder / path.name)
    write_tensors(folder, tensors, shards)
    return folder


def perturbed(source: Path, folder: Path, name: str, seed: int) -> Path:
    """The tensor's entries multiplied by 1 ± 1/2 at random: it matters, and nothing overflows."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def edit(tensors: Tensors) -> None:
        tensor = tensors[name]
        factors = 1 + torch.rand(tensor.shape, generator=generator) - 0.5
        tensors[name] = (tensor.float() * factors).to(tensor.dtype)

    return edited(source, folder, edit)


def silenced(source: Path, folder: Path, heard: Collection[str]) -> Path:
    """A copy in which only the named blocks ("0.self_attn", "2.mlp", …) add to the residual."""

    def edit(tensors: Tensors) -> None:
        for name in tensors:
            block = ".".join(name.removeprefix("model.layers.").split(".")[:2])
            if name.endswith(("o_proj.weight", "down_proj.weight")) and block not in heard:
                tensors[name] = tensors[name] * 0

    return edited(source, folder, edit)


def without_tensor(source: Path, folder: Path, name: str) -> Path:
    """A tensor is missing."""
    return edited(source, folder, lambda tensors: tensors.__delitem__(name))


def with_extra_tensor(source: Path, folder: Path, name: str) -> Path:
    """A tensor that no model asks for is left over."""
    import torch

    return edited(source, folder, lambda tensors: tensors.update({name: torch.ones(3)}))


def with_shape(source: Path, folder: Path, name: str) -> Path:
    """A tensor has one row too many."""
    import torch

    def edit(tensors: Tensors) -> None:
        tensors[name] = torch.cat([tensors[name], tensors[name][:1]])

    return edited(source, folder, edit)


def with_integers(source: Path, folder: Path, name: str) -> Path:
    """A tensor is stored as int32, as a quantised file without its scales would have it."""
    import torch

    def edit(tensors: Tensors) -> None:
        tensors[name] = (tensors[name] * 100).to(torch.int32)

    return edited(source, folder, edit)


def truncated_file(source: Path, folder: Path) -> Path:
    """model.safetensors ends in the middle."""
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    blob = path.read_bytes()
    path.write_bytes(blob[: len(blob) * 2 // 3])
    return folder


def without_shard(source: Path, folder: Path) -> tuple[Path, str]:
    """A sharded copy that lacks one file; the folder and the file's name."""
    edited(source, folder, lambda tensors: None, shards=3)
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name = sorted(set(weight_map.values()))[1]
    (folder / name).unlink()
    return folder, name

"""Checkpoints made from another: perturbed, silenced, and bad ones that must be refused."""

from __future__ import annotations

import json
import re
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


def perturbed(source: Path, folder: Path, names: Collection[str], seed: int) -> Path:
    """The tensors' entries multiplied by 1 ± 1/2 at random: they matter, and nothing overflows.

    Four-bit codes are drawn anew instead.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)

    def edit(tensors: Tensors) -> None:
        for name in sorted(names):
            tensor = tensors[name]
            if tensor.dtype == torch.uint8:
                tensors[name] = torch.randint(
                    256, tensor.shape, dtype=torch.uint8, generator=generator
                )
                continue
            factors = 1 + torch.rand(tensor.shape, generator=generator) - 0.5
            tensors[name] = (tensor.float() * factors).clamp(-448, 448).to(tensor.dtype)

    return edited(source, folder, edit)


# The matrix that ends a block, quantised or not, experts together or one by one.
BLOCK_END = re.compile(
    r"model\.(?:language_model\.)?layers\.(\d+)\.(self_attn|linear_attn|mlp(?:\.\w*experts?)?)\."
    r"(?:\d+\.)?(?:o_proj|out_proj|down_proj)(?:\.weight)?"
)


def block_of(name: str) -> str | None:
    """The block ("0.self_attn", "2.mlp.experts", …) that a tensor ends; None for other tensors."""
    match = BLOCK_END.fullmatch(name)
    return match and f"{match[1]}.{match[2]}"


def silenced(source: Path, folder: Path, heard: Collection[str]) -> Path:
    """A copy in which only the named blocks add to the residual stream."""

    def edit(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            block = block_of(name)
            if block is not None and block not in heard:
                tensors[name] = tensor.new_zeros(tensor.shape)

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

    def edit(tensors: Tensors) -> None:
        rows = tensors[name].reshape(-1, *tensors[name].shape[1:])
        tensors[name] = rows[[*range(len(rows)), 0]]

    return edited(source, folder, edit)


def with_integers(source: Path, folder: Path, name: str) -> Path:
    """A tensor is stored as int32, as a quantised file without its scales would have it."""
    import torch

    def edit(tensors: Tensors) -> None:
        tensors[name] = (tensors[name].float() * 100).to(torch.int32)

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

"""Strict access to the tensors of a checkpoint's folder."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .config import Config, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FORMATS = ("F32", "BF16", "F16")


class Checkpoint:
    """Open files of a checkpoint and which of them holds each tensor."""

    def __init__(self, holders: Mapping[str, Any]) -> None:
        self._holders = holders

    def read(self, name: str) -> torch.Tensor:
        """A float32 copy of the tensor, so that no view keeps the mapped file alive."""
        return self._holders[name].get_tensor(name).to(torch.float32, copy=True)


@contextmanager
def open_checkpoint(
    folder: Path, config: Config, expected: Mapping[str, tuple[int, ...]]
) -> Iterator[Checkpoint]:
    """Open a checkpoint that holds just the expected tensors (name -> shape).

    ValueError names the tensor that is missing, left over, or of a wrong shape or dtype, or the
    file that is missing or broken. No tensor is read before all are checked.
    """
    with ExitStack() as stack:
        holders: dict[str, Any] = {}
        for path, mapped in _files(folder):
            file = stack.enter_context(_open(path))
            for name in file.keys():  # noqa: SIM118 (the handle is no mapping)
                if name in expected and (mapped is None or name in mapped):
                    _check(file, name, expected[name])
                    holders[name] = file
                elif not _ignored(name, config):
                    raise ValueError(f"{path.name} holds {name}, which is not expected")
        for name in expected:
            if name not in holders:
                raise ValueError(f"tensor {name} is missing")
        yield Checkpoint(holders)


def _files(folder: Path) -> list[tuple[Path, set[str] | None]]:
    """The files with the names that the index puts into each (None: no index)."""
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return [(folder / SINGLE, None)]
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{INDEX} has no weight_map")
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{INDEX} puts {name} outside the folder: {shard!r}")
        shards.setdefault(shard, set()).add(name)
    return [(folder / shard, names) for shard, names in sorted(shards.items())]


def _open(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path.name} is missing in {path.parent}")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path.name} is no whole safetensors file: {error}") from error


def _check(file: Any, name: str, shape: tuple[int, ...]) -> None:
    held = file.get_slice(name)
    if tuple(held.get_shape()) != shape:
        raise ValueError(f"{name} has shape {tuple(held.get_shape())}, expected {shape}")
    if held.get_dtype() not in FORMATS:
        raise ValueError(f"{name} has dtype {held.get_dtype()}, which is not supported")


def _ignored(name: str, config: Config) -> bool:
    """Whether a tensor is known and left unread: other parts of the model, or a derived copy."""
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    return name.startswith(("model.visual.", "mtp.")) or name.endswith(".rotary_emb.inv_freq")

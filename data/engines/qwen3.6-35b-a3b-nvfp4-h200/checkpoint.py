"""Strict reader of Hugging Face folders: each tensor is taken once, by name, shape and dtype."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

# Known and unused: vision tower, draft (MTP) layer, activation scales (whose absence is an error,
# for ModelOpt writes one for every quantised matrix), KV scales of other deployments.
UNUSED_PREFIXES = ("model.visual.", "mtp.", "model.language_model.mtp.")
UNUSED_SUFFIXES = (".input_scale", ".k_scale", ".v_scale", "rotary_emb.inv_freq")

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Checkpoint:
    """The tensors of a folder with model.safetensors or a sharded index."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder, self.device = Path(folder), device
        self._files: dict[Path, object] = {}
        self._where = self._index()
        self._left = set(self._where)

    def _index(self) -> dict[str, Path]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map = json.loads(index.read_text())["weight_map"]
            return {name: self.folder / file for name, file in weight_map.items()}
        single = self.folder / "model.safetensors"
        if not single.is_file():
            raise ValueError(f"checkpoint: no model.safetensors or index in {self.folder}")
        return {name: single for name in self._open(single).keys()}  # noqa: SIM118

    def _open(self, path: Path):
        if path not in self._files:
            if not path.is_file():
                raise ValueError(f"checkpoint: {path} is named by the index but does not exist")
            try:
                self._files[path] = safe_open(str(path), framework="pt", device=str(self.device))
            except Exception as error:
                raise ValueError(f"checkpoint: {path} cannot be read: {error}") from error
        return self._files[path]

    def take(
        self, name: str, shape: Sequence[int], dtypes: tuple[torch.dtype, ...] = FLOATS
    ) -> torch.Tensor:
        """The tensor `name` on the engine's device; ValueError names what is wrong with it."""
        if name not in self._left:
            fault = "is taken twice" if name in self._where else "is missing"
            raise ValueError(f"checkpoint: tensor {name} {fault}")
        try:
            tensor = self._open(self._where[name]).get_tensor(name)
        except Exception as error:
            raise ValueError(f"checkpoint: tensor {name} cannot be read: {error}") from error
        if tuple(tensor.shape) != tuple(shape) and not (tensor.numel() == 1 and not shape):
            raise ValueError(
                f"checkpoint: tensor {name} has shape {tuple(tensor.shape)}, not {tuple(shape)}"
            )
        if tensor.dtype not in dtypes:
            raise ValueError(f"checkpoint: tensor {name} has dtype {tensor.dtype}, not {dtypes}")
        self._left.discard(name)
        return tensor

    def take_stack(
        self, names: Sequence[str], shape: Sequence[int], dtypes: tuple[torch.dtype, ...] = FLOATS
    ) -> torch.Tensor:
        """Equal tensors of many experts, stacked in the order of `names`."""
        return torch.stack([self.take(name, shape, dtypes).reshape(tuple(shape)) for name in names])

    def require(self, name: str) -> None:
        """Refuse a folder whose scalar `name`, which is not used, is missing or none."""
        if name not in self._where:
            raise ValueError(f"checkpoint: tensor {name} is missing")
        found = self._open(self._where[name]).get_slice(name)
        shape, dtype = found.get_shape(), found.get_dtype()
        if shape not in ([], [1]) or dtype not in ("F32", "BF16", "F16"):
            raise ValueError(f"checkpoint: tensor {name} is {dtype} {shape}, not a scalar float")

    def finish(self) -> None:
        """Refuse tensors that nobody took, apart from the known unused ones."""
        left = sorted(
            name
            for name in self._left
            if not name.startswith(UNUSED_PREFIXES) and not name.endswith(UNUSED_SUFFIXES)
        )
        self._files.clear()
        if left:
            raise ValueError(f"checkpoint: {len(left)} tensors left over, the first is {left[0]}")

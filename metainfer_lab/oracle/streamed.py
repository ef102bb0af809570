"""The oracle layer by layer: a layer's weights are read and dequantised when its turn comes, and
let go when it has answered. A model of any size needs memory for its widest layer alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.utils._python_dispatch import _disable_current_modes

from metainfer_lab.checkpoints import modelopt, nvfp4
from metainfer_lab.model import ModelDims
from metainfer_lab.model.tensors import Tensor as Parameter
from metainfer_lab.model.tensors import text_prefix
from metainfer_lab.oracle.service import PLAIN, Service

AT_ONCE = 32  # experts that are dequantised together: what lies between takes twice their room


class StreamedService(Service):
    """Embedding, final norm and head stay in memory, the layers do not."""

    def load(self, checkpoint: str, dtype: torch.dtype) -> Any:
        """A model without weights, whose layers fetch theirs."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(checkpoint).get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **PLAIN)
        source = Weights(Path(checkpoint), self.device, dtype)
        for index, layer in enumerate(model.model.layers):
            layer.register_forward_pre_hook(_fetch(source, index))
            layer.register_forward_hook(_let_go)
        _put(model, source.of(None), strict=False)
        model.tie_weights()
        return model


class Weights:
    """A checkpoint's weights in the plain layout of the text model, read when asked for.

    A GPU with room for them, as they are stored, reads each once: a pass then costs seconds.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype):
        self.dims = ModelDims.from_config(folder)
        self.files = Files(folder, device)
        self.dtype = dtype
        on_gpu = device.type == "cuda"
        self.keeps = on_gpu and 2 * self.files.size < torch.cuda.mem_get_info(device)[0]
        self.kept: dict[int | None, dict[str, torch.Tensor | modelopt.Quantised]] = {}

    def of(self, layer: int | None) -> dict[str, torch.Tensor]:
        """Name -> tensor of a layer, named within it; of what belongs to no layer when None."""
        prefix = text_prefix(self.dims)
        within = f"{prefix}layers.{layer}."

        def wanted(parameter: Parameter) -> bool:
            return parameter.layer == layer

        stored = self.kept.get(layer) or dict(modelopt.stacked(self.files, self.dims, wanted))
        if self.keeps:
            self.kept[layer] = stored
        return {
            name.removeprefix(within).replace(prefix, "model.", 1): self._wide(form)
            for name, form in stored.items()
        }

    def _wide(self, form: torch.Tensor | modelopt.Quantised) -> torch.Tensor:
        if isinstance(form, nvfp4.Nvfp4) and form.codes.ndim == 3:
            *rows, half = form.codes.shape
            made = form.codes.new_empty(*rows, 2 * half, dtype=self.dtype)
            for at in range(0, rows[0], AT_ONCE):
                made[at : at + AT_ONCE] = form[at : at + AT_ONCE].dequantise(self.dtype)
            return made
        if isinstance(form, modelopt.Quantised):
            return form.dequantise(self.dtype)
        return form.to(self.dtype)


class Files(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint folder by name, each read on demand."""

    def __init__(self, folder: Path, device: torch.device):
        self.open, self.where = ExitStack(), {}
        paths = sorted(folder.glob("*.safetensors"))
        for path in paths:
            file = self.open.enter_context(safe_open(path, framework="pt", device=str(device)))
            self.where |= dict.fromkeys(file.keys(), file)
        self.size = sum(path.stat().st_size for path in paths)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.where[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)

    def __len__(self) -> int:
        return len(self.where)


def _fetch(source: Weights, index: int) -> Callable[..., None]:
    def hook(layer: torch.nn.Module, args: tuple[Any, ...]) -> None:
        with _disable_current_modes():  # of thousands of reads each would go through Python twice
            _put(layer, source.of(index), strict=True)

    return hook


def _let_go(layer: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    layer.to("meta")


def _put(module: torch.nn.Module, tensors: dict[str, torch.Tensor], strict: bool) -> None:
    _, strange = module.load_state_dict(tensors, strict=strict, assign=True)
    assert not strange, f"the model has no {strange[0]}"

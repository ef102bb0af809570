"""How weights are stored: bytes a weight by format, and the names that a checkpoint uses on disk.

NVFP4 (ModelOpt): `weight` uint8 [out, in/2], `weight_scale` E4M3 [out, in/16], and two fp32
scalars `weight_scale_2` and `input_scale`; experts are stored one by one. FP8 (ModelOpt):
`weight` E4M3 and the scalars `weight_scale` and `input_scale`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from metainfer_lab.errors import InputError
from metainfer_lab.model.config import ModelDims
from metainfer_lab.model.tensors import Shape, Tensor, inventory

LINEAR = ("attention", "gdn", "mlp", "routed_experts", "shared_expert")
BITS = {"fp32": 32.0, "bf16": 16.0, "fp8": 8.0, "int8": 8.0, "nvfp4": 4.0}
NVFP4_BLOCK = 16

SCHEMES: dict[str, dict[str, str]] = {
    "fp32": {},
    "bf16": {},
    "fp8": dict.fromkeys(LINEAR, "fp8"),
    "int8": dict.fromkeys((*LINEAR, "head"), "int8"),
    "nvfp4": dict.fromkeys((*LINEAR, "head"), "nvfp4"),
    "nvfp4-mix": {
        **dict.fromkeys(("routed_experts", "shared_expert", "head"), "nvfp4"),
        **dict.fromkeys(("attention", "gdn"), "fp8"),
    },
}
UNQUANTISED = {"fp32": "fp32", "int8": "fp32"}


@dataclass(frozen=True)
class Stored:
    """A tensor on disk; dtype is safetensors' word, or FLOAT where any float type will do."""

    shape: Shape
    dtype: str

    def accepts(self, dtype: str) -> bool:
        """Whether a safetensors dtype may stand here."""
        return (
            dtype in {"F64", "F32", "BF16", "F16"} if self.dtype == "FLOAT" else dtype == self.dtype
        )


def storage(scheme: str, modules: Mapping[str, str] | None = None) -> dict[str, str]:
    """Module class -> format for a weight scheme of the spec, single classes overridden.

    Classes that are not named keep the scheme's plain type under the key `small`.
    """
    if scheme not in SCHEMES:
        raise InputError(f"precision.weights: {scheme!r}; use one of {', '.join(SCHEMES)}")
    plain = UNQUANTISED.get(scheme, "bf16")
    classes = (*LINEAR, "head", "embedding", "small", "vision", "mtp")
    return dict.fromkeys(classes, plain) | SCHEMES[scheme] | dict(modules or {})


def stored_bytes(tensor: Tensor, form: str) -> int:
    """Bytes of a tensor in a format, scales included (4-byte scalars of a tensor are not).

    int8 adds an fp32 scale a row, NVFP4 an E4M3 scale for 16 weights (0.5625 bytes a weight).
    """
    if form == "int8":
        return tensor.size + 4 * (tensor.size // tensor.shape[-1])
    if form == "nvfp4":
        return tensor.size // 2 + tensor.size // NVFP4_BLOCK
    return int(tensor.size * BITS[form] // 8)


def disk_tensors(dims: ModelDims) -> dict[str, Stored]:
    """Name -> shape and dtype of every tensor of a checkpoint, vision and MTP included.

    Raises InputError where the config's quantisation map names a module that the model lacks.
    """
    strange = dims.quantised_layers.keys() - {tensor.module for tensor in inventory(dims)}
    if strange:
        raise InputError(
            f"config.json: quantization_config: {len(strange)} modules are not in the model, "
            f"{min(strange)} first; the map belongs to another model"
        )
    return {name: stored for tensor in inventory(dims) for name, stored in _on_disk(dims, tensor)}


def storage_on_disk(dims: ModelDims) -> dict[str, str]:
    """Module class -> format that a config's quantisation map gives; empty for a plain one."""
    formats: dict[str, set[str]] = {}
    for tensor in inventory(dims):
        form = dims.quantised_layers.get(tensor.module)
        if form is not None:
            formats.setdefault(tensor.role, set()).add(form)
    return {role: "+".join(sorted(forms)) for role, forms in formats.items()}


def _on_disk(dims: ModelDims, tensor: Tensor) -> Iterator[tuple[str, Stored]]:
    form = dims.quantised_layers.get(tensor.module)
    if form is None:
        yield tensor.name, Stored(tensor.shape, "FLOAT")
        return
    *_, out, width = tensor.shape
    for module, rows, _ in tensor.parts():
        yield from _quantised_tensors(module, (len(range(out)[rows]), width), form)


def _quantised_tensors(module: str, shape: Shape, form: str) -> Iterator[tuple[str, Stored]]:
    out, width = shape
    if form == "nvfp4":
        yield f"{module}.weight", Stored((out, width // 2), "U8")
        yield f"{module}.weight_scale", Stored((out, width // NVFP4_BLOCK), "F8_E4M3")
        yield f"{module}.weight_scale_2", Stored((), "F32")
    else:
        yield f"{module}.weight", Stored(shape, "F8_E4M3")
        yield f"{module}.weight_scale", Stored((), "F32")
    yield f"{module}.input_scale", Stored((), "F32")

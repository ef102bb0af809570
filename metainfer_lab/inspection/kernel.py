"""What an engine says of a kernel: where it is written, how it is built, launched and used.

The convention. An engine folder may hold a module `inspection.py` with one function,

    kernels(config: pathlib.Path) -> list[dict]

which returns the fields of `Kernel` below as plain data, for the model of that config.json. It
may call the engine's own code (compile-time sizes, tile shapes, grids), so that what is inspected
is what is launched; it needs nothing of this package and no GPU.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from metainfer_lab.errors import InputError


class Record(BaseModel):
    """Unknown fields are mistakes, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Kernel(Record):
    """One kernel at one operating point.

    files: CUDA C++ sources, compiled as one text in this order (relative to the engine folder);
        for Triton one Python file that can be imported alone.
    entry: the `__global__` function, or the `@triton.jit` one.
    defines, options: the compiler's (NVRTC); num_warps, num_stages and the like for Triton.
    arguments: Triton only, in order: a pointer or scalar type ("*bf16", "fp32"), or an int, the
        value passed (whether 16 divides it changes the code); constants: its constexpr arguments.
    grid: thread blocks of a launch that multiply weights; block: threads in each; shared_bytes:
        dynamic shared memory of a block (Triton says its own); launches: how many a step has.
    weights: multiplied by a launch; weight_bits: what one takes in memory, block scales included;
        other_bytes: read and written besides, other_operations: of other matrix products; tokens:
        columns that each weight meets.
    column_tiles: matrix products that share one fragment of weights (more than 8 tokens).
    weights_per_lane: of one turn of the inner loop, for a kernel without matrix products.
    naive: the operator's specification in the engine, as `file.py:function`, one or several.
    """

    name: str
    language: Literal["cuda", "triton"] = "cuda"
    files: tuple[str, ...] = ("kernel.cu",)
    entry: str
    defines: dict[str, int | str] = {}
    options: dict[str, int | bool] | tuple[str, ...] = ()
    arguments: dict[str, int | str] = {}
    constants: dict[str, int | float | bool] = {}
    grid: int = Field(default=1, ge=1)
    block: int = Field(default=128, ge=1, le=1024)
    shared_bytes: int = Field(default=0, ge=0)
    launches: int = Field(default=1, ge=1)
    weights: int = Field(default=0, ge=0)
    weight_bits: float = Field(default=16, gt=0)
    other_bytes: int = Field(default=0, ge=0)
    other_operations: int = Field(default=0, ge=0)
    tokens: int = Field(default=1, ge=1)
    column_tiles: int = Field(default=1, ge=1)
    weights_per_lane: int | None = Field(default=None, ge=1)
    naive: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _of_its_language(self) -> Kernel:
        if not self.files or (self.language == "triton" and (len(self.files) > 1 or self.defines)):
            raise ValueError("a Triton kernel has one file, and constants instead of defines")
        if self.language == "cuda" and (self.arguments or isinstance(self.options, dict)):
            raise ValueError("a CUDA kernel has no `arguments`; its options are a list of flags")
        return self

    @property
    def bytes(self) -> float:
        """What one launch must move to and from memory."""
        return self.weights * self.weight_bits / 8 + self.other_bytes

    @property
    def operations(self) -> float:
        """Multiplications and additions of one launch's products."""
        return 2.0 * self.weights * self.tokens + self.other_operations

    @property
    def warps(self) -> int:
        """Warps of one launch."""
        return self.grid * -(-self.block // 32)

    def source(self, folder: Path) -> str:
        """Text of its files; InputError names one that is missing."""
        return "".join(self._read(folder, file) for file in self.files)

    def specification(self, folder: Path) -> str:
        """Text of its naive functions; InputError names one that is missing."""
        return "\n\n\n".join(self._function(folder, *name.split(":")) for name in self.naive)

    def _read(self, folder: Path, file: str) -> str:
        if not (folder / file).is_file():
            raise InputError(f"inspection: kernel {self.name}: {folder.name}/{file} is missing")
        return (folder / file).read_text()

    def _function(self, folder: Path, file: str, name: str) -> str:
        text = self._read(folder, file)
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return ast.get_source_segment(text, node) or ""
        raise InputError(f"inspection: kernel {self.name}: no function {name} in {file}")


def parse(declared: list[dict]) -> list[Kernel]:
    """Declarations as kernels; InputError names the kernel and the field at fault."""
    kernels = []
    for number, fields in enumerate(declared):
        try:
            kernels.append(Kernel.model_validate(fields))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "kernel"
            name = fields.get("name", f"number {number}") if isinstance(fields, dict) else number
            raise InputError(f"inspection: kernel {name}: {field}: {first['msg']}") from None
    names = [kernel.name for kernel in kernels]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"inspection: two kernels are named {repeated[0]!r}; name each once")
    return kernels

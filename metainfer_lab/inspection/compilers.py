"""CUDA C++ through NVRTC and Triton through its own compiler, for any target, without a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from metainfer_lab.errors import InputError
from metainfer_lab.inspection.kernel import Kernel
from metainfer_lab.inspection.targets import Target


@dataclass(frozen=True)
class Compiled:
    """Machine code and the stages before it, by name: ptx; ttir and ttgir where Triton.

    shared_bytes: dynamic shared memory that Triton decided on.
    """

    cubin: bytes
    stages: dict[str, str]
    shared_bytes: int = 0


def compile_cuda(
    source: str, arch: str, defines: Mapping[str, int | str] = {}, options: Sequence[str] = ()
) -> Compiled:
    """One CUDA C++ text; InputError holds the compiler's first error."""
    flags = [f"--gpu-architecture={arch}", "--std=c++17", *options]
    flags += [f"-D{name}={value}" for name, value in defines.items()]
    lib, program = _nvrtc(), ctypes.c_void_p()
    lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        encoded = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        if lib.nvrtcCompileProgram(program, len(flags), encoded):
            raise InputError(
                f"inspection: {arch}: {_first_error(_text(lib, program, 'ProgramLog'))}"
            )
        return Compiled(_bytes(lib, program, "CUBIN"), {"ptx": _text(lib, program, "PTX")})
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def _nvrtc() -> ctypes.CDLL:
    """libnvrtc of the nvidia-cuda-nvrtc wheel; its builtins must be in the process first."""
    found = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (found.submodule_search_locations or ())] if found else []
    for builtins in (path for root in roots for path in root.rglob("libnvrtc-builtins.so*")):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    paths = [
        path for root in roots for path in root.rglob("libnvrtc.so*") if "alt" not in path.name
    ]
    if not paths:
        raise InputError("inspection: libnvrtc is missing; pip install nvidia-cuda-nvrtc")
    return ctypes.CDLL(str(max(paths, key=lambda path: path.name)))


def _bytes(lib: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(lib, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def _text(lib: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    return _bytes(lib, program, what).rstrip(b"\0").decode()


def _first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no log")


def compile_triton(kernel: Kernel, folder: Path, target: Target) -> Compiled:
    """One `@triton.jit` function; its file is imported, so it must be one that you trust."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(_import_file(folder / kernel.files[0]), kernel.entry, None)
    if not isinstance(function, triton.JITFunction):
        raise InputError(
            f"inspection: kernel {kernel.name}: no @triton.jit function {kernel.entry}"
        )
    source = ASTSource(function, *_specialised(kernel, function.arg_names))
    built = triton.compile(
        source,
        target=GPUTarget("cuda", target.capability, 32),
        options={"num_warps": kernel.block // 32, "enable_fp_fusion": True, **dict(kernel.options)},
    )
    stages = {stage: built.asm[stage] for stage in ("ttir", "ttgir", "ptx")}
    return Compiled(built.asm["cubin"], stages, built.metadata.shared)


def _specialised(kernel: Kernel, names: Sequence[str]) -> tuple[dict, dict, dict]:
    """Signature, constants and attributes as triton's launcher would find them."""
    if missing := set(names) - set(kernel.arguments) - set(kernel.constants):
        raise InputError(f"inspection: kernel {kernel.name}: {sorted(missing)[0]} has no type")
    signature, constants, attributes = {}, dict(kernel.constants), {}
    for place, name in enumerate(names):
        value = kernel.arguments.get(name, "constexpr")
        if value == 1:  # the launcher makes it a constant
            value, constants[name] = "constexpr", 1
        signature[name] = value if isinstance(value, str) else "i32"
        if value % 16 == 0 if isinstance(value, int) else value.startswith("*"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _import_file(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(f"inspected_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise InputError(f"inspection: {path.name} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

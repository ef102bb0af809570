"""CUDA C++ at run time: NVRTC compiles a source file for this GPU, the driver launches it.

ctypes on two libraries that torch already brings; a launch asks for programmatic dependent launch,
so a kernel may begin before the one before it in the stream has ended (both kernels say in their
source where they depend).
"""

import ctypes
import functools
import glob
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

HERE = Path(__file__).parent
MAX_DYNAMIC_SHARED, SHARED_CARVEOUT = 8, 9  # CUfunction_attribute
CLUSTER_DIMENSION, PROGRAMMATIC_SERIALIZATION = 4, 6  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", ctypes.c_uint),
    )


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    folders = {
        os.path.dirname(os.path.dirname(torch.__file__)) + "/nvidia/*/lib",
        "/usr/local/cuda/lib64",
    }
    found = sorted(path for folder in folders for path in glob.glob(f"{folder}/libnvrtc.so.*"))
    if not found:
        raise OSError(
            "libnvrtc.so not found beside torch nor in /usr/local/cuda: install nvidia-cuda-nvrtc"
        )
    return ctypes.CDLL(found[0])


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} failed with CUDA error {code}")


def compile_cubin(source: str, defines: dict[str, int], arch: str) -> bytes:
    """Machine code of `kernels/<source>` with common.cuh before it; `arch` is e.g. "sm_90a"."""
    text = (HERE / "common.cuh").read_text() + (HERE / source).read_text()
    flags = [f"-arch={arch}", "-std=c++17"]
    flags += [f"-D{name}={value}" for name, value in defines.items()]
    lib, program = _nvrtc(), ctypes.c_void_p()
    _check(
        lib.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), source.encode(), 0, None, None
        ),
        source,
    )
    options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    code = lib.nvrtcCompileProgram(program, len(flags), options)
    if code:
        raise RuntimeError(
            f"{source} {defines}: "
            + _text(lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog, program)
        )
    cubin = _bytes(lib.nvrtcGetCUBINSize, lib.nvrtcGetCUBIN, program)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin


def _bytes(size_of, get, program) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)), "NVRTC")
    buffer = ctypes.create_string_buffer(size.value)
    _check(get(program, buffer), "NVRTC")
    return buffer.raw


def _text(size_of, get, program) -> str:
    return _bytes(size_of, get, program).decode(errors="replace").rstrip("\0")


_compilers: ThreadPoolExecutor | None = None


@contextmanager
def compiling() -> Iterator[None]:
    """Inside, the kernels that calls ask for are compiled in threads side by side; none is
    launched.
    """
    global _compilers
    with ThreadPoolExecutor() as _compilers:
        try:
            yield
        finally:
            _compilers = None


class CudaKernel:
    """One compiled kernel: `kernel(grid, *arguments)`; tensors pass as pointers, int and float as
    32 bits.
    """

    def __init__(
        self,
        source: str,
        name: str,
        defines: dict[str, int],
        threads: int,
        shared_bytes: int,
        cluster: int,
    ):
        major, minor = torch.cuda.get_device_capability()
        compiled = functools.partial(compile_cubin, source, defines, f"sm_{major}{minor}a")
        self._cubin = _compilers.submit(compiled).result if _compilers else compiled
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._name, self._threads = name, threads
        self._shared, self._cluster = shared_bytes, cluster
        self._attributes = (_Attribute * 2)()
        self._attributes[0].id, self._attributes[0].value[0] = PROGRAMMATIC_SERIALIZATION, 1
        self._attributes[1].id = CLUSTER_DIMENSION
        self._attributes[1].value[0:3] = [cluster, 1, 1]

    def _load(self) -> None:
        driver, name = _driver(), self._name
        torch.cuda.current_stream().synchronize()  # makes torch's context current
        _check(
            driver.cuModuleLoadData(ctypes.byref(self._module), self._cubin()), f"loading {name}"
        )
        function = ctypes.byref(self._function)
        _check(driver.cuModuleGetFunction(function, self._module, name.encode()), name)
        for attribute, value in ((MAX_DYNAMIC_SHARED, self._shared), (SHARED_CARVEOUT, 100)):
            code = driver.cuFuncSetAttribute(self._function, attribute, value)
            _check(code, f"{name}: {self._shared} bytes")

    def __call__(
        self, grid: tuple[int, int, int], *arguments: torch.Tensor | int | float | None
    ) -> None:
        if _compilers:
            return
        if not self._function:
            self._load()
        values = [_as_c(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        config = _Config(
            grid,
            (self._threads, 1, 1),
            self._shared,
            torch.cuda.current_stream().cuda_stream,
            self._attributes,
            2 if self._cluster > 1 else 1,
        )
        _check(
            _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None),
            self._name,
        )


def _as_c(value: torch.Tensor | int | float | None):
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value)

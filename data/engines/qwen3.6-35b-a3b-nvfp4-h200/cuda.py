"""CUDA C++ without a build step: NVRTC at load, a cubin cache, launches through the driver.

Launches go to torch's current stream, so torch can capture them in graphs; each carries the
programmatic-dependent-launch attribute (CUDA C++ programming guide, chapter of that name).
"""

import ctypes
import glob
import hashlib
import os
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

KERNELS = Path(__file__).parent / "kernels"
# Translation units: headers, then the file that gives its name.
SOURCES = {
    files[-1]: ("common.cuh", *files)
    for files in (
        ("mixers.cuh", "producer.cuh", "consumer.cuh", "persistent.cu"),
        ("batched.cu",),
        ("experts.cu",),
        ("mixers.cuh", "chunked.cu"),
        ("mixers.cuh", "prompt.cu"),
        ("prompt_experts.cu",),
        ("mixers.cuh", "delta.cu"),
        ("mixers.cuh", "attention.cu"),
        ("sampling.cu",),
    )
}

CLUSTER_ATTRIBUTE = 4
PDL_ATTRIBUTE = 6
MAX_DYNAMIC_SHARED = 8
CARVEOUT = 9


@cache
def _nvrtc() -> ctypes.CDLL:
    """libnvrtc of the nvidia wheels; its builtins must be in the process first."""
    roots = {sysconfig.get_paths()[key] for key in ("purelib", "platlib")}
    found = []
    for root in roots:
        for path in glob.glob(f"{root}/nvidia/**/libnvrtc-builtins.so*", recursive=True):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        found += glob.glob(f"{root}/nvidia/**/libnvrtc.so.1*", recursive=True)
    found = sorted(path for path in found if "alt" not in path)
    return ctypes.CDLL(found[0] if found else "libnvrtc.so")


def compile_source(source: str, target: str, defines: dict[str, int]) -> bytes:
    """The cubin of one translation unit for `target` (sm_90a); RuntimeError holds the log."""
    lib, program = _nvrtc(), ctypes.c_void_p()
    options = [f"--gpu-architecture={target}", "--std=c++17", "-default-device"]
    options += [f"-D{name}={value}" for name, value in defines.items()]
    encoded = [option.encode() for option in options]
    lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    failed = lib.nvrtcCompileProgram(
        program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)
    )
    try:
        if failed:
            raise RuntimeError(_text(lib, program, "ProgramLog"))
        return _text(lib, program, "CUBIN", raw=True)
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _text(lib: ctypes.CDLL, program: ctypes.c_void_p, what: str, raw: bool = False):
    size = ctypes.c_size_t()
    getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(lib, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw if raw else buffer.value.decode()


def build(target: str, defines: dict[str, int]) -> dict[str, bytes]:
    """Cubins by file name, from the cache where the sources and sizes are the same."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / "qwen36-kernels"

    def one(name: str) -> tuple[str, bytes]:
        source = "".join((KERNELS / part).read_text() for part in SOURCES[name])
        used = {name: value for name, value in defines.items() if name in source}
        key = hashlib.sha256(f"{target}{sorted(used.items())}{source}".encode()).hexdigest()
        path = folder / f"{key}.cubin"
        if path.is_file():
            return name, path.read_bytes()
        cubin = compile_source(source, target, used)
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(cubin)
        part.replace(path)
        return name, cubin

    with ThreadPoolExecutor(len(SOURCES)) as pool:
        return dict(pool.map(one, SOURCES))


class LaunchAttribute(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int * 16),
    ]


class LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    ]


class Kernel:
    """One __global__ function whose only parameter is a struct."""

    def __init__(self, driver: ctypes.CDLL, function: ctypes.c_void_p, name: str) -> None:
        self.driver, self.function, self.name = driver, function, name
        self._shared = 0

    def launch(self, grid, block: int, args: ctypes.Structure, shared: int = 0) -> None:
        """Queue on torch's current stream; RuntimeError names the kernel and the driver's code."""
        import torch

        if shared > self._shared:
            self._check(self.driver.cuFuncSetAttribute(self.function, MAX_DYNAMIC_SHARED, shared))
            self._shared = shared
        grid = (*grid, 1, 1)[:3] if isinstance(grid, tuple) else (grid, 1, 1)
        attribute = LaunchAttribute(id=PDL_ATTRIBUTE)
        attribute.value[0] = int(USE_PDL)
        config = LaunchConfig(
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(block, 1, 1),
            shared,
            torch.cuda.current_stream().cuda_stream,
            ctypes.pointer(attribute),
            1,
        )
        params = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.pointer(args), ctypes.c_void_p))
        self._check(self.driver.cuLaunchKernelEx(ctypes.byref(config), self.function, params, None))

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"kernel {self.name}: CUDA driver error {code}")


USE_PDL = True


class Kernels:
    """All kernels of the engine by name, loaded into the current context."""

    def __init__(self, defines: dict[str, int]) -> None:
        import torch

        major, minor = torch.cuda.get_device_capability()
        self.driver = ctypes.CDLL("libcuda.so.1")
        torch.cuda.current_stream().synchronize()  # the context exists from here on
        self._modules = []
        self._kernels: dict[str, Kernel] = {}
        for cubin in build(f"sm_{major}{minor}a", defines).values():
            self._load(cubin)

    def _load(self, cubin: bytes) -> None:
        module, count = ctypes.c_void_p(), ctypes.c_uint()
        self._check(self.driver.cuModuleLoadData(ctypes.byref(module), cubin))
        self._modules.append((module, cubin))
        self._check(self.driver.cuModuleGetFunctionCount(ctypes.byref(count), module))
        functions = (ctypes.c_void_p * count.value)()
        self._check(self.driver.cuModuleEnumerateFunctions(functions, count, module))
        for function in functions:
            name, handle = ctypes.c_char_p(), ctypes.c_void_p(function)
            self._check(self.driver.cuFuncGetName(ctypes.byref(name), handle))
            # One carve-out for all: a change of it would drain the multiprocessor between kernels.
            self._check(self.driver.cuFuncSetAttribute(handle, CARVEOUT, 100))
            self._kernels[name.value.decode()] = Kernel(self.driver, handle, name.value.decode())

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"loading kernels: CUDA driver error {code}")

    def __getitem__(self, name: str) -> Kernel:
        return self._kernels[name]

    def close(self) -> None:
        """Unload the modules."""
        for module, _ in self._modules:
            self.driver.cuModuleUnload(module)
        self._modules.clear()

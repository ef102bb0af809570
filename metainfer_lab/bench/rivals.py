"""Who can run beside an engine, and how each is opened for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import psutil

from metainfer_lab.bench import llamacpp
from metainfer_lab.bench.products import Products
from metainfer_lab.bench.rival import Rival
from metainfer_lab.bench.transformers import Transformers
from metainfer_lab.bench.vllm import Vllm
from metainfer_lab.errors import InputError
from metainfer_lab.hardware import usable_cores
from metainfer_lab.spec import Spec

if TYPE_CHECKING:
    from metainfer_lab.bench.compare import Measurement
    from metainfer_lab.engine import Engine


def chosen(spec: Spec, beside: Sequence[str]) -> list[str]:
    """The rivals asked for, and those that the spec's goals compare with; InputError if unknown."""
    asked = [*beside, *spec.goals.ratio_to, *(["products"] * bool(spec.goals.fraction_of_products))]
    known = [*RIVALS, "products"]
    if unknown := [name for name in asked if name not in known]:
        raise InputError(f"beside: {unknown[0]!r} is not known; use {' or '.join(known)}")
    return list(dict.fromkeys(asked))


def runner(name: str, stack: ExitStack, engine: Engine, measured: Measurement) -> Callable:
    """Open a rival; the result times one run of it while the engine's processes stand still."""
    if measured.workload.gap_ms:
        raise InputError("beside: rivals start all streams at once; leave them out, or gap_ms at 0")
    if name == "products":
        return while_frozen(engine, _products(stack, engine, measured))
    rival = stack.enter_context(RIVALS[name](engine, measured))
    vocab = measured.plan.dims.vocab_size
    while_frozen(engine, lambda: rival.find_best(measured.workload, vocab))()
    measured.about[name] = rival.describe()
    measured.versions |= rival.versions
    prompts = measured.workload.prompts(vocab)
    return while_frozen(engine, lambda: rival.sample(next(prompts), measured.workload))


def _products(stack: ExitStack, engine: Engine, measured: Measurement) -> Callable:
    products = Products(measured.plan.dims, engine.spec.precision.weights, usable_cores())
    rival = stack.enter_context(products)
    measured.about["products"] = {"threads": rival.threads}
    return rival.rate


def _transformers(engine: Engine, measured: Measurement) -> Rival:
    gpu = measured.plan.hardware.is_gpu
    dtype, device = ("bfloat16", "cuda") if gpu else ("float32", "cpu")
    return Transformers(engine.checkpoint, dtype, device)


def _vllm(in_process: bool) -> Callable[[Engine, Measurement], Rival]:
    def opened(engine: Engine, measured: Measurement) -> Rival:
        sizes = (measured.workload.concurrency, engine.spec.workload.max_context)
        return Vllm(engine.checkpoint, *sizes, engine.spec.parallel.tp, in_process=in_process)

    return opened


def _llama_cpp(engine: Engine, measured: Measurement) -> Rival:
    llamacpp.single(measured.workload)
    spec = engine.spec
    source, context = spec.checkpoint.source, spec.workload.max_context
    return llamacpp.LlamaCpp(source, spec.precision.weights, context)


RIVALS: dict[str, Callable[[Engine, Measurement], Rival]] = {
    "transformers": _transformers,
    "vllm": _vllm(in_process=False),
    "vllm-in-process": _vllm(in_process=True),
    "llama.cpp": _llama_cpp,
}


def while_frozen(engine: Engine, run: Callable) -> Callable:
    """Stop the engine's processes while a rival runs: an engine that spins would slow it."""

    def frozen() -> object:
        host = psutil.Process(engine.process.confined.process.pid)
        family = [host, *host.children(recursive=True)]
        try:
            for process in family:
                process.suspend()
            return run()
        finally:
            for process in family:
                process.resume()

    return frozen

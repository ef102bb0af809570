"""Who can run beside an engine, and how each is opened for it."""

from __future__ import annotations

import subprocess
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
    from metainfer_lab.plan import Plan


def chosen(spec: Spec, beside: Sequence[str]) -> list[str]:
    """The rivals asked for, and those that the spec's goals compare with; InputError if unknown."""
    asked = [*beside, *spec.goals.ratio_to, *(["products"] * bool(spec.goals.fraction_of_products))]
    if unknown := [name for name in asked if name not in RIVALS]:
        raise InputError(f"beside: {unknown[0]!r} is not known; use {' or '.join(RIVALS)}")
    return list(dict.fromkeys(asked))


class Company:
    """Rivals of a spec, each opened for its first point and kept for the others: some take a minute
    to start. A context manager; streams: the most that any point has."""

    def __init__(self, spec: Spec, beside: Sequence[str], streams: int) -> None:
        self.names, self.streams = chosen(spec, beside), streams
        self.stack, self.opened = ExitStack(), {}

    def __enter__(self) -> Company:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stack.close()

    def runner(self, name: str, engine: Engine, measured: Measurement) -> Callable:
        """What times one run of a rival while the engine's processes stand still."""
        workload, vocab = measured.workload, measured.plan.dims.vocab_size
        if workload.gap_ms:
            text = "beside: rivals start all streams at once; leave them out, or gap_ms at 0"
            raise InputError(text)
        if name not in self.opened:
            made = RIVALS[name](engine, measured.plan, self.streams)
            self.opened[name] = self.stack.enter_context(made)
        rival = self.opened[name]
        if isinstance(rival, Products):
            measured.about[name] = {"threads": rival.threads}
            return while_frozen(engine, rival.rate)
        while_frozen(engine, lambda: rival.find_best(workload, vocab))()
        measured.about[name] = rival.describe()
        if measured.plan.hardware.is_gpu:
            memory = gpu_memory(rival.worker.process.pid)
            measured.about[name] |= {"ready_s": round(rival.ready_s, 1)} | memory
        measured.versions |= rival.versions
        prompts = workload.prompts(vocab)
        return while_frozen(engine, lambda: rival.sample(next(prompts), workload))


def _products(engine: Engine, planned: Plan, streams: int) -> Products:
    return Products(planned.dims, engine.spec.precision.weights, usable_cores())


def _transformers(engine: Engine, planned: Plan, streams: int) -> Rival:
    gpu = planned.hardware.is_gpu
    dtype, device = ("bfloat16", "cuda") if gpu else ("float32", "cpu")
    return Transformers(engine.checkpoint, dtype, device)


def _vllm(in_process: bool) -> Callable[[Engine, Plan, int], Rival]:
    def opened(engine: Engine, planned: Plan, streams: int) -> Rival:
        sizes = (streams, engine.spec.workload.max_context)
        return Vllm(engine.checkpoint, *sizes, engine.spec.parallel.tp, in_process=in_process)

    return opened


def _llama_cpp(engine: Engine, planned: Plan, streams: int) -> Rival:
    llamacpp.single(streams)
    spec = engine.spec
    source, context = spec.checkpoint.source, spec.workload.max_context
    return llamacpp.LlamaCpp(source, spec.precision.weights, context)


RIVALS: dict[str, Callable[[Engine, Plan, int], Rival | Products]] = {
    "transformers": _transformers,
    "vllm": _vllm(in_process=False),
    "vllm-in-process": _vllm(in_process=True),
    "llama.cpp": _llama_cpp,
    "products": _products,
}


def gpu_memory(pid: int) -> dict[str, float]:
    """{"gpu_gib": what a process and its descendants hold of the GPUs}, as the driver counts it."""
    family = {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    ask = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = [line.split(", ") for line in subprocess.check_output(ask, text=True).splitlines()]
    held = [int(mib) for one, mib in lines if int(one) in family and mib.isdigit()]
    return {"gpu_gib": round(sum(held) / 1024, 1)} if held else {}


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

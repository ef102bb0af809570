"""How the numbers of this run were taken, on one H200: python measure.py ENGINE_FOLDER.

Weights come from a seed straight on the GPU. First every operator against its naive form in float64
on a two-layer model of full width, then the whole model: steps by batch size, kernels alone, the
step without each kernel, first tokens. About two minutes.
"""

import importlib
import importlib.util
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

CONTEXT = 1088  # tokens before the measured step


def load_package(folder: Path):
    """Import an engine folder as the package `engine`."""
    where = [str(folder)]
    spec = importlib.util.spec_from_file_location(
        "engine", folder / "__init__.py", submodule_search_locations=where
    )
    sys.modules["engine"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class SeededSource:
    """Random tensors of any name, spread so that activations stay of order one."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator("cuda").manual_seed(seed)

    def _normal(self, shape, spread: float, centre: float = 0.0) -> torch.Tensor:
        draw = torch.randn(shape, generator=self.random, device="cuda")
        return (draw * spread + centre).bfloat16()

    def take(self, name: str, shape, dtypes=None) -> torch.Tensor:
        """E2M1 codes are uniform (2.93 RMS), scales 24 .. 104: weights of spread 0.02."""
        uniform = lambda: torch.rand(shape, generator=self.random, device="cuda")  # noqa: E731
        if name.endswith("weight_scale_2"):
            return torch.tensor(0.02 / 187, device="cuda")
        if name.endswith("weight_scale"):
            return (
                (uniform() * 80 + 24).to(torch.float8_e4m3fn)
                if shape
                else torch.tensor(0.0002, device="cuda")
            )
        if dtypes == (torch.uint8,):
            return (uniform() * 256).to(torch.uint8)
        if dtypes == (torch.float8_e4m3fn,):
            return self._normal(shape, 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        spreads = {"embed": 1.0, "conv1d": 0.4, "norm": 0.1, "gate.weight": 0.03, "in_proj": 0.03}
        spread = next((value for key, value in spreads.items() if key in name), 0.5)
        return self._normal(shape, spread, 1.0 if "linear_attn.norm" in name else 0.0)

    def take_stack(self, names, shape, dtypes=None) -> torch.Tensor:
        if not shape:
            return torch.full((len(names),), 0.02 / 187, device="cuda")
        return self.take(names[0], (len(names), *shape), dtypes)

    def require(self, name: str) -> None:
        """Everything is there."""

    def finish(self) -> None:
        """Nothing is left over."""


def replay_times(run, repeats: int = 15) -> list[float]:
    """Sorted times in us of a captured graph of `run`."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    return timed(graph.replay, repeats)


def timed(work, repeats: int) -> list[float]:
    """Sorted times in us between events around `work`."""
    times = []
    for _ in range(repeats):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        work()
        events[1].record()
        events[1].synchronize()
        times.append(events[0].elapsed_time(events[1]) * 1e3)
    return sorted(times)


def spread(times: list[float]) -> str:
    pick = lambda share: times[int(len(times) * share)]  # noqa: E731
    return f"{pick(0.5):.1f} us (p20 {pick(0.2):.1f}, p80 {pick(0.8):.1f})"


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@torch.inference_mode()
def check_operators(engine, config) -> None:
    """Relative L2 of every kernel against its naive form in float64."""
    config = replace(config, layer_types=("linear_attention", "full_attention"))
    weights = engine.weights.Loader(SeededSource(1), config, packed=True).load()
    weights.embedding = weights.embedding.bfloat16()
    kernels = engine.cuda.Kernels(engine.buffers.defines(config))
    for rows in (1, 2, 12, 32):
        bench = engine.operators.Workbench(config, weights, rows, 512, rows, kernels)
        launched = bench.step.operators
        for name, operator in engine.operators.OPERATORS.items():
            if name not in launched:
                continue
            bench = operator.inputs(config, weights, rows, 512, rows, kernels)
            want, got = operator.naive(bench, torch.float64), operator.kernel(bench)
            errors = {key: f"{relative(got[key], want[key]):.1e}" for key in want}
            print("operator", name, "rows", rows, errors, flush=True)


def fill_slots(runner, rows: int) -> None:
    """`rows` sequences of CONTEXT random tokens' length, with pages of their own."""
    cache, slots = runner.cache, runner.slots
    slots.token[:rows] = torch.randint(0, runner.config.vocab, (rows,), device="cuda")
    slots.position[:rows] = CONTEXT
    pages = torch.arange(1, rows * cache.pages_per_slot + 1, device="cuda").int()
    cache.page_table[:rows] = pages.view(rows, -1)
    runner.buffers.row_slot[:rows] = torch.arange(rows, device="cuda").int()


@torch.inference_mode()
def measure_steps(runner) -> None:
    for rows, graph in sorted(runner.graphs.items()):
        fill_slots(runner, 32)
        times = timed(graph.replay, 33)
        rate = rows / times[len(times) // 2] * 1e6
        print(f"step rows {rows}: {spread(times)} = {rate:.0f} tok/s", flush=True)


@torch.inference_mode()
def measure_kernels(runner, rows: int) -> None:
    """Each kind of kernel alone, and the step without it."""
    step = runner.steps[rows]

    def run(launches) -> None:
        for item in launches:
            runner.kernels[item.kernel].launch(item.grid, item.block, item.args, item.shared)

    fill_slots(runner, 32)
    whole = replay_times(lambda: run(step.launches))[7]
    for kind in dict.fromkeys(item.kernel for item in step.launches):
        own = [item for item in step.launches if item.kernel == kind]
        others = [item for item in step.launches if item.kernel != kind]
        alone = replay_times(lambda own=own: run(own))[7] / len(own)
        without = replay_times(lambda others=others: run(others))[7]
        print(f"kernel rows {rows} {kind}: {len(own)} x {alone:.2f} us, step {whole - without:.0f}")


@torch.inference_mode()
def measure_prompts(runner) -> None:
    for length in (128, 1024):
        tokens = torch.randint(0, runner.config.vocab, (length,)).tolist()
        times = []
        for _ in range(6):
            torch.cuda.synchronize()
            start = time.perf_counter()
            runner.pick([0], runner.prefill(0, 0, tokens, True)).read()
            times.append((time.perf_counter() - start) * 1e3)
        print(f"first token, prompt {length}:", [f"{t:.1f}" for t in sorted(times)], "ms")


def main(folder: Path, model: Path) -> None:
    engine = load_package(folder)
    for part in ("config", "weights", "cuda", "buffers", "operators"):
        importlib.import_module(f"engine.{part}")
    config = engine.config.read_config(model)
    check_operators(engine, config)
    built = engine.build(config, SeededSource(1), torch.device("cuda"), 32, 2048)
    measure_steps(built.runner)
    measure_kernels(built.runner, 32)  # the step of one row is a single kernel
    measure_prompts(built.runner)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(__file__).parents[2] / "models/qwen3.6-35b-a3b-nvfp4")

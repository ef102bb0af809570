"""The machine's side of an optimisation: does it start, how fast is it, where does its time go.

`Bench` is all that the loop knows of it; a test puts a machine of its own making in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from metainfer_lab.agent.overlap import overlaps
from metainfer_lab.bench.compare import floors, time_engine
from metainfer_lab.bench.rivals import while_frozen
from metainfer_lab.bench.timing import Sample
from metainfer_lab.bench.workload import Workload
from metainfer_lab.engine import Engine, EngineDied, EngineError
from metainfer_lab.optimise.profiling import profiled
from metainfer_lab.optimise.records import METRICS, Block, Profile
from metainfer_lab.plan import plan
from metainfer_lab.spec import Spec

RENEWED_AFTER = 10  # blocks; where a process's memory lies may make it faster for all its life
SMOKE = Workload(prompt_len=8, output_len=8)


class Broken(Exception):
    """A candidate that ended or hung: `status` is `crash` or `timeout`, the text what it said."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


class Bench(Protocol):
    """smoke raises Broken; pairs gives one block a call; floor: the most decode tok/s; profile
    raises Broken; copied: what passages of others' code a tree repeats, empty for none."""

    def smoke(self, folder: Path) -> None: ...

    def pairs(
        self, parent: Path, candidate: Path, name: str, workload: Workload
    ) -> AbstractContextManager[Callable[[], Block]]: ...

    def profile(self, folder: Path) -> Profile: ...

    def floor(self) -> float: ...

    def copied(self, folder: Path) -> str: ...


class RealBench:
    """Engines in confined processes on this machine, on the spec's checkpoint."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.plan = spec, plan(spec)

    def smoke(self, folder: Path) -> None:
        """Load the checkpoint and decode a few tokens."""
        with broken(), self._open(folder) as engine:
            time_engine(engine, SMOKE, next(SMOKE.prompts(self.plan.dims.vocab_size)))

    @contextmanager
    def pairs(
        self, parent: Path, candidate: Path, name: str, workload: Workload
    ) -> Iterator[Callable[[], Block]]:
        """Both engines loaded and warm, one of them at work while the other stands still.

        Every few blocks both start anew, so that a process's luck with its memory falls on many.
        """
        prompts = workload.prompts(self.plan.dims.vocab_size)
        with ExitStack() as stack:
            engines: list[Engine] = []
            count = 0

            def block() -> Block:
                nonlocal count
                with broken():
                    if count % RENEWED_AFTER == 0:
                        stack.close()
                        opened = (self._open(folder) for folder in (parent, candidate))
                        engines[:] = [stack.enter_context(engine) for engine in opened]
                        warm = next(prompts)
                        for engine in engines:
                            time_engine(engine, workload, warm)
                    count += 1
                    return four_runs(engines, name, workload, next(prompts), count % 2 == 0)

            yield block

    def profile(self, folder: Path) -> Profile:
        """See `profiling`."""
        return profiled(folder, self.spec, self.plan)

    def floor(self) -> float:
        """Most decode tok/s of the spec's traffic on this machine, by the roofline."""
        return floors(self.plan, Workload.from_spec(self.spec))["decode_tok_s"]

    def copied(self, folder: Path) -> str:
        """The blank-sheet check of a generated engine, asked of what was changed too."""
        return "; ".join(map(str, overlaps(folder)))

    def _open(self, folder: Path) -> Engine:
        return Engine(folder, self.spec)


@contextmanager
def broken() -> Iterator[None]:
    """Deaths, hangs and errors of an engine as Broken."""
    try:
        yield
    except EngineDied as error:
        ours = str(error).split(";")[0]  # what follows are the engine's last words
        raise Broken("timeout" if "gave no answer" in ours else "crash", str(error)) from error
    except (EngineError, ValueError) as error:
        raise Broken("crash", str(error)) from error


def four_runs(
    engines: list[Engine], name: str, workload: Workload, batch: list[list[int]], swapped: bool
) -> Block:
    """A B B A on one batch (B A A B when swapped), the engine at rest frozen."""
    order = [1, 0, 0, 1] if swapped else [0, 1, 1, 0]
    runs: tuple[list[Sample], list[Sample]] = ([], [])
    for index in order:
        engine, other = engines[index], engines[1 - index]
        run = while_frozen(other, lambda engine=engine: time_engine(engine, workload, batch))
        runs[index].append(run())
    sides = [{m: tuple(_short(getattr(s, m)) for s in side) for m in METRICS} for side in runs]
    first, second = (side[0].tokens for side in runs)
    pairs = [(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=False)]
    same = sum(a == b for a, b in pairs) / len(pairs)
    return Block(workload=name, parent=sides[0], candidate=sides[1], same_tokens=same)


def _short(value: float) -> float:
    """Six digits: more than any clock gives, and a raw file that stays small."""
    return float(f"{value:.6g}")

"""What baselines share: a process of their own, and the clock that times our engines too."""

from __future__ import annotations

import time
from collections.abc import Iterator

from metainfer_lab.bench.timing import Sample, sample_from
from metainfer_lab.bench.worker import Worker
from metainfer_lab.bench.workload import Workload

OPENING_S = 900.0  # vLLM on 35 billion weights in four bits was silent for more than 230 s


class Rival:
    """An engine of somebody else behind a pipe; a context manager.

    Its child (`python -m module`) answers `open` with versions and what to say of the setting, and
    `run` with {"tokens": [[stream, token], ...]} as soon as tokens are there; the parent stamps
    what arrives.
    """

    name: str
    module: str

    def __init__(self, **opening: object) -> None:
        self.worker = Worker(self.module)
        self.opening = opening

    def __enter__(self) -> Rival:
        begun, patience = time.perf_counter(), self.worker.timeout_s
        self.worker.timeout_s = OPENING_S
        self.worker.__enter__()
        try:
            opened = self.worker.call(op="open", **self.opening)
        except BaseException:
            self.worker.__exit__(None, None, None)
            raise
        self.worker.timeout_s = patience
        self.ready_s = time.perf_counter() - begun
        self.versions: dict[str, str] = opened["versions"]
        self.opened = opened
        return self

    def __exit__(self, *exc: object) -> None:
        self.worker.__exit__(*exc)

    def find_best(self, workload: Workload, vocab_size: int) -> None:
        """Choose the setting that is fastest here, where there is a choice."""

    def options(self) -> dict[str, object]:
        """What goes with each run."""
        return {}

    def sample(self, prompts: list[list[int]], workload: Workload) -> Sample:
        """One timed run of all prompts together, greedy, exactly output_len tokens each."""
        request = {"op": "run", "prompts": prompts, "output_len": workload.output_len}

        def events() -> Iterator[tuple[int, int]]:
            self.worker.send(**request, **self.options())
            missing = len(prompts) * workload.output_len
            while missing:
                tokens = self.worker.receive()["tokens"]
                missing -= len(tokens)
                yield from tokens

        return sample_from(events(), prompts)

    def describe(self) -> dict[str, object]:
        """What a row must say of how this baseline ran."""
        return dict(self.opened.get("setting", {}))

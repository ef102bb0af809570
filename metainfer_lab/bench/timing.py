"""Clocks outside the engine's process, and comparisons whose order cancels drift.

The parent stamps tokens as they arrive. TPOT = (last - first)/(n - 1) per request and TTFT = first
arrival - submission, as `vllm bench serve` defines them; the decode rate counts all streams
together while every one of them is decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from metainfer_lab.errors import InputError


@dataclass(frozen=True)
class Sample:
    """One timed run: prompts, the tokens that came back, and four readings of the clock.

    device_ms: the same run by events of the GPU, from before the first submission until it has no
    work left after the last token; None on a CPU.
    """

    prompts: list[list[int]]
    tokens: list[list[int]]
    ttft_ms: float
    tpot_ms: float
    decode_tok_s: float
    output_tok_s: float
    device_ms: float | None = None

    @property
    def host_ms(self) -> float:
        """From the first submission to the last token, by the clock outside the process."""
        return 1e3 * sum(map(len, self.tokens)) / self.output_tok_s


@dataclass(frozen=True)
class Spread:
    """Median with 20th and 80th percentiles of n runs."""

    n: int
    p20: float
    p50: float
    p80: float


@dataclass(frozen=True)
class Ratio:
    """Ratio of two rates measured in turn: median over the pairs, least and greatest pair."""

    median: float
    lo: float
    hi: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lo:.2f}..{self.hi:.2f}, {self.pairs} pairs)"


def spread(values: Iterable[float]) -> Spread:
    """Percentiles of at least one value."""
    values = [float(value) for value in values]
    p20, p50, p80 = np.percentile(values, [20, 50, 80])
    return Spread(len(values), float(p20), float(p50), float(p80))


def sample_from(
    events: Iterable[tuple[int, int]],
    prompts: list[list[int]],
    clock: Callable[[], float] = time.perf_counter,
    starts: Sequence[float] | None = None,
) -> Sample:
    """Stamp (stream, token) events as they arrive; the clock starts when the iteration does.

    starts: seconds after that at which each stream was submitted (read when all events are in);
    None: all at once. ValueError for a stream of fewer than two tokens: a rate needs an interval.
    """
    start = clock()
    stamps: list[list[float]] = [[] for _ in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    for stream, token in events:
        stamps[stream].append(clock() - start)
        tokens[stream].append(token)
    return _read_clock(prompts, tokens, stamps, starts or [0.0] * len(prompts))


def _read_clock(
    prompts: list[list[int]],
    tokens: list[list[int]],
    stamps: list[list[float]],
    starts: Sequence[float],
) -> Sample:
    short = [index for index, times in enumerate(stamps) if len(times) < 2]
    if short:
        raise ValueError(f"stream {short[0]} sent {len(stamps[short[0]])} tokens; two are needed")
    first, last = max(times[0] for times in stamps), min(times[-1] for times in stamps)
    within = sum(first < at <= last for times in stamps for at in times)
    if last <= first:
        raise ValueError("the streams were never all decoding at once: ask for more output tokens")
    per_token = [(times[-1] - times[0]) / (len(times) - 1) for times in stamps]
    total, end = sum(map(len, tokens)), max(times[-1] for times in stamps)
    return Sample(
        prompts=prompts,
        tokens=tokens,
        ttft_ms=1e3 * float(np.median([t[0] - s for t, s in zip(stamps, starts, strict=True)])),
        tpot_ms=1e3 * float(np.median(per_token)),
        decode_tok_s=within / (last - first),
        output_tok_s=total / end,
    )


def agreement(samples: Sequence[Sample]) -> dict[str, str]:
    """The condition that says how far the GPU's clock and the host's agree; none on a CPU.

    InputError where they differ by more than 5 per cent and a step: work went on after the last
    token, or one of the clocks is wrong.
    """
    both = [(one.device_ms, one.host_ms, one.tpot_ms) for one in samples if one.device_ms]
    for device, host, step in both:
        if abs(device - host) > 0.05 * host + step:
            raise InputError(
                f"bench: a run took {host:.1f} ms by the host's clock and {device:.1f} ms by the "
                "GPU's events: work went on after the last token, or a clock is wrong"
            )
    ratio = spread(device / host for device, host, _ in both).p50 if both else 0.0
    return {"device_events": f"{ratio:.3f} of the host clock"} if both else {}


def in_turn(runners: dict[str, Callable[[], object]], runs: int) -> dict[str, list]:
    """Results of each runner, taken in turn and back again: A B B A A B ... `runs` of each.

    A drift of the machine (clocks, temperature, neighbours) then falls on all alike.
    """
    results: dict[str, list] = {name: [] for name in runners}
    order = list(runners)
    for _ in range(runs):
        for name in order:
            results[name].append(runners[name]())
        order.reverse()
    return results


def paired_ratio(ours: Iterable[float], theirs: Iterable[float]) -> Ratio:
    """Ratio ours/theirs of measurements taken in the same turns (see `in_turn`)."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Ratio(float(np.median(ratios)), min(ratios), max(ratios), len(ratios))

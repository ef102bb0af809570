"""Every tolerance that a gate uses, in one table.

Two ways to know what a right engine may err by:

- Float32 errs by the order of its sums alone, the same everywhere: fixed numbers, about five times
  what was measured against the float64 oracle over at least 500 positions each. The plain engine
  errs by 2e-6 at most on tiny checkpoints (relative L2 of a row of logits; tail of five draws
  4e-6). Depth has a tail: on SmolLM2-135M 2.6e-6 at the 95th percentile and 2e-5 at 99.9 %, yet
  of 7,200 rows of random ids three or four beyond 1e-4, up to 5e-4 in three right engines and
  2e-4 in transformers' own float32. So p95 holds an engine there and the greatest row has twice
  what was seen; log probability grows with it (8 to 10 times it), KL with its square.
- Rounded activations err by what this model and this prompt make of it: the oracle itself runs
  with rounded activations, two ways, and a gate allows multiples of the greater error. Measured
  with three further ways of rounding to 8 bits on eight tiny checkpoints and SmolLM2, the ratio
  was at most 1.0 (median), 1.1 (95th percentile), 4.7 (one row), 15 (KL of one row), 8 (log
  probability over the row's RMS change, over all of the vocabulary). Seven bits give a median
  ratio of 1.6 and more: they fail. Two bfloat16 runs of transformers, whose residual stream is
  rounded too, against the oracle with rounded module inputs and outputs: 1.7, 1.9, 7.5, 20, 20
  (the last two on SmolLM2, whose stored weights are wider than bfloat16; else 12).

Routers, on six tiny checkpoints of the hybrid, 250 tokens through four layers: logits of the plain
engine are off by 1.8e-5 at most in float32; in bfloat16 throughout, 2% of the choices differ from
the oracle's, and what was left out leads by 2.4 times the change that rounding makes at most (rows
of logits, with the engine's experts: ratios of 1.5 median, 1.6, 5.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from metainfer_lab.oracle import Rounding

Depth = Literal["tiny", "full"]


class Fixed(NamedTuple):
    """row, p95: relative L2 error of a row of logits, greatest and 95th percentile; kl: of the two
    distributions, nats; logprob: absolute, nats, of one token; router: absolute, of the difference
    of two router logits."""

    row: float
    p95: float
    kl: float
    logprob: float
    router: float


FIXED: dict[tuple[str, Depth], Fixed] = {
    ("fp32", "tiny"): Fixed(row=2e-5, p95=1e-5, kl=1e-7, logprob=1e-4, router=4e-5),
    ("fp32", "full"): Fixed(row=1e-3, p95=2e-5, kl=4e-5, logprob=1e-2, router=4e-4),
}


class Calibration(NamedTuple):
    """roundings: how the oracle rounds to show what the format costs; the others: what is allowed,
    in units of that cost."""

    roundings: tuple[Rounding, ...]
    row: float
    p95: float
    median: float
    kl: float
    logprob: float
    router: float = 0.0


CALIBRATED: dict[str, Calibration] = {
    "int8_dynamic": Calibration(("symmetric", "asymmetric"), 7.0, 2.0, 1.5, 30.0, 9.0),
    "bf16": Calibration(("bfloat16",), 10.0, 2.5, 2.5, 40.0, 20.0, 4.0),
}

# Quantiles of fewer rows than this are not asked for: they would be a row's luck.
LEAST_ROWS = 20
# A perturbed tensor moves the logits by far more than this relative L2 distance (measured: 1e-3
# and more), or the checkpoint maker is at fault.
LEAST_MOVE = 1e-4
# A tensor counts as unread if the engine moves by less than this share of the oracle's move.
UNREAD_SHARE = 0.01
# One sampling test may reject a right engine with this probability.
ALPHA = 1e-6


@dataclass(frozen=True)
class Allowance:
    """What a right engine may err by on given rows of logits. rows, kl, logprob: [rows]."""

    rows: np.ndarray
    kl: np.ndarray
    logprob: np.ndarray
    p95: float
    median: float | None


def fixed(activations: str, depth: Depth, n: int) -> Allowance:
    """The allowance of n rows where the error is the same everywhere."""
    table = FIXED[activations, depth]
    rows, kl, logprob = (np.full(n, x) for x in (table.row, table.kl, table.logprob))
    return Allowance(rows, kl, logprob, table.p95, None)


def calibrated(by: Calibration, rows: np.ndarray, kl: np.ndarray, logprob: np.ndarray) -> Allowance:
    """Multiples of the errors [rows] that rounding costs, a row's own or the median row's."""
    least = [np.maximum(error, np.median(error)) for error in (rows, kl, logprob)]
    return Allowance(
        rows=by.row * least[0],
        kl=by.kl * least[1],
        logprob=by.logprob * least[2],
        p95=by.p95 * float(np.quantile(rows, 0.95)),
        median=by.median * float(np.median(rows)),
    )


class Drift(NamedTuple):
    """growth: RMS error of the last third of a long answer over that of the first; floor: the least
    that counts as an error at the beginning, in units of a logprob's allowance."""

    growth: float = 4.0
    floor: float = 0.002


DRIFT = Drift()


class Memory(NamedTuple):
    """block: most positions that share one block of a cache; conv: an engine's convolution tail in
    units of the predicted one (three columns as bf16; four as fp32 is 2.7); late: steps by which a
    result may come late; unsaid_least, unsaid_most: bytes of live tensors by which a longer context
    grows an engine, over the growth of what stats() says; per_step: tensors, or caches of a token,
    that a step of steady decode may leave; per_request: objects that a finished request may leave;
    resident: bytes by which a round of requests may grow the process (malloc rounds up)."""

    block: int = 64
    conv: int = 3
    late: int = 4
    unsaid_least: float = 0.8
    unsaid_most: float = 1.5
    per_step: float = 0.25
    per_request: float = 0.5
    resident: int = 2 << 20


MEMORY = Memory()

# Relative L2 of one row of an operator's result, by the format it computed in; short: rows shorter
# than this share of the longest are measured by that share. The plain engines' operators err by
# 2.3e-6 at most in float32 (attention) and 2e-15 in float64; Qwen3-8B's kernels, on an H200 at full
# width, by 2.8e-3 at most (rounding to bfloat16 alone is 1.7e-3).
OPERATOR = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 8e-3, "short": 0.05}

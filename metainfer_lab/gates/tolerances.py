"""Every tolerance that a gate uses, in one table. See `tolerance` for how one is picked.

Measured against the float64 oracle over at least 500 positions each, then multiplied by about
five: the plain float32 engine on tiny checkpoints errs by 2e-6 at most (relative L2 of a logits
row; tail of five draws 4e-6), on SmolLM2-135M by 1.8e-5 at most (the first position, where a few
channels are huge) and 2.6e-6 at the 95th percentile.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Depth = Literal["tiny", "full"]


class Tolerance(NamedTuple):
    """l2_max, l2_p95: relative L2 error of a row of logits, greatest and 95th percentile; kl: of
    the two distributions, nats; logprob: absolute, nats, of one token; exact_text: whether equal
    calls in other company may be asked for equal tokens."""

    l2_max: float
    l2_p95: float
    kl: float
    logprob: float
    exact_text: bool


TOLERANCES: dict[tuple[str, Depth], Tolerance] = {
    ("fp32", "tiny"): Tolerance(2e-5, 1e-5, 1e-7, 1e-4, True),
    ("fp32", "full"): Tolerance(1e-4, 2e-5, 1e-6, 1e-3, True),
}

# A perturbed tensor moves the logits by far more than this relative L2 distance (measured: 1e-3
# and more), or the checkpoint maker is at fault.
LEAST_MOVE = 1e-4
# One sampling test may reject a right engine with this probability.
ALPHA = 1e-6


def tolerance(activations: str, depth: Depth) -> Tolerance:
    """The entry for a spec's activations; the key is what the numbers were measured with."""
    return TOLERANCES[activations, depth]

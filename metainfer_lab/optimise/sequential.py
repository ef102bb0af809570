"""When noise may decide: a sequential sign test on log-ratios, valid however often one looks.

Each block gives one log-ratio x. If the true median is at most t, each x exceeds t with
probability at most 1/2 whatever came before, so betting on "more than half" makes a nonnegative
martingale, which reaches 1/alpha with probability at most alpha at any time (Ville's inequality).
Its bet is a mixture over all p in (1/2, 1); inverted it is a confidence sequence of the median
(Robbins 1970, Ann. Math. Stat. 41; Howard and Ramdas 2022, Bernoulli 28). Only signs count: heavy
tails and a noise that changes with the hour cost power, never validity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

Decision = Literal["faster", "simpler", "no gain", "undecided"]
LEAST_BLOCKS = 12


@cache
def needed(n: int, alpha: float) -> int:
    """How many of n signs must agree before the evidence against "a half or fewer" is 1/alpha.

    The evidence of s agreeing signs, 2^(n+1) * integral of p^s (1-p)^(n-s) over (1/2, 1), equals
    sum over j <= s of C(n+1, j), divided by (n+1) C(n, s). n + 1 where n signs cannot suffice.
    """
    below = sum(math.comb(n + 1, j) for j in range(n // 2 + 1))
    for s in range(n // 2 + 1, n + 1):
        below += math.comb(n + 1, s)
        if below * alpha >= (n + 1) * math.comb(n, s):
            return s
    return n + 1


def least_blocks(alpha: float) -> int:
    """From how many blocks on a bound at this level exists; LEAST_BLOCKS at least."""
    n = LEAST_BLOCKS
    while needed(n, alpha) > n:
        n += 1
    return n


@dataclass(frozen=True)
class Interval:
    """A median log-ratio with a lower and an upper bound (infinite where signs are too few)."""

    median: float
    lo: float
    hi: float
    n: int


def interval(values: Sequence[float], alpha_lo: float, alpha_hi: float) -> Interval:
    """Median of at least one log-ratio; each bound holds at all times, at its own level."""
    ordered, n = sorted(values), len(values)
    lo, hi = needed(n, alpha_lo), needed(n, alpha_hi)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return Interval(
        median=middle,
        lo=ordered[n - lo] if lo <= n else -math.inf,
        hi=ordered[hi - 1] if hi <= n else math.inf,
        n=n,
    )


@dataclass(frozen=True)
class Rule:
    """gain: what a keep must exceed (a ratio less one); loss: what one with fewer lines may cost;
    alpha_keep: chance to keep what does not; alpha_discard: chance to drop what does; most, least:
    blocks."""

    gain: float
    loss: float
    alpha_keep: float
    alpha_discard: float
    most: int
    least: int

    def interval(self, values: Sequence[float]) -> Interval:
        """The interval whose ends decide."""
        return interval(values, self.alpha_keep, self.alpha_discard)

    def decide(self, values: Sequence[float], fewer_lines: bool) -> Decision | None:
        """What these blocks allow to say; None: measure on.

        With fewer lines it suffices that speed is equal: no loss beyond the rule's.
        """
        if len(values) < min(self.least, self.most):
            return None
        found, gain, loss = self.interval(values), math.log1p(self.gain), math.log1p(-self.loss)
        if found.lo > gain:
            return "faster"
        if fewer_lines and found.lo > loss:
            return "simpler"
        if found.hi < (loss if fewer_lines else gain):
            return "no gain"
        return "undecided" if len(values) >= self.most else None

    def within(self, values: Sequence[float], most_loss: float) -> bool | None:
        """Whether a loss stays below `most_loss` (0.05: five per cent); None: measure on.

        Too little evidence when the blocks are spent counts as a loss: a guard must be shown.
        """
        if len(values) < min(self.least, self.most):
            return None
        limit = math.log1p(-most_loss)
        found = interval(values, self.alpha_discard, self.alpha_discard)
        if found.lo > limit:
            return True
        return False if found.hi < limit or len(values) >= self.most else None

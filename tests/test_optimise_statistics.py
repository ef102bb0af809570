"""Decisions that noise cannot make: levels that hold at every look, and a landscape that is known.

The machine of these tests is as noisy as a shared one; what is decided there is counted.
"""

from __future__ import annotations

import math
import random

import pytest
from optimise_fakes import GATES, Machine, Memory, settings, words

from metainfer_lab.optimise import search
from metainfer_lab.optimise.sequential import interval, needed
from metainfer_lab.optimise.trial import Trial

IDEAS = ("half", "two", "twenty", "fake", "zero", "greedy", "crash", "hang", "shorter")
GOOD = ("two", "twenty", "shorter")
FALSE = ("half", "zero", "fake", "greedy", "crash", "hang")
RUNS = 200


def test_evidence_is_a_bet_that_an_honest_coin_seldom_wins():
    """Looking after every toss, for 300 tosses: the level holds; looking for more, it would not."""
    rng, alpha, won, naive = random.Random(), 0.05, 0, 0
    for _ in range(1500):
        heads, hit, peeked = 0, False, False
        for n in range(1, 301):
            heads += rng.random() < 0.5
            hit |= heads >= needed(n, alpha)
            peeked |= n >= 12 and heads - n / 2 > 1.645 * math.sqrt(n) / 2
        won, naive = won + hit, naive + peeked
    assert won / 1500 < alpha + 0.02
    assert naive / 1500 > 0.15


@pytest.mark.parametrize("n", [12, 40, 120])
def test_the_threshold_is_that_of_the_integral(n):
    """`needed` against the evidence integrated by hand: 2 * mean over p in (1/2, 1)."""
    steps = [0.5 + (i + 0.5) / 20000 for i in range(10000)]
    for alpha in (0.05, 0.005):
        s = needed(n, alpha)
        for agreeing, enough in ((s, True), (s - 1, False)):
            evidence = sum((2 * p) ** agreeing * (2 - 2 * p) ** (n - agreeing) for p in steps)
            assert (evidence / 10000 >= 1 / alpha) is enough


def test_an_interval_holds_the_median_at_every_look():
    rng, missed = random.Random(), 0
    for _ in range(400):
        values, out = [], False
        for n in range(1, 121):
            values.append(rng.gauss(0, 1) / max(1e-3, abs(rng.gauss(0, 1))))  # Cauchy
            found = interval(values, 0.05, 0.05)
            out |= n % 4 == 0 and not found.lo <= 0 <= found.hi
        missed += out
    assert missed / 400 < 0.14  # two ends at 0.05 each, and the error of 400 draws


class Tree:
    """Words in place of a folder of files."""

    def __init__(self, said):
        self.said = said

    def __truediv__(self, name):
        return self

    def read_text(self):
        return " ".join(self.said)


def gates(folder, names):
    passed = not ("fake" in words(folder) and "decode" in names)
    return {"passed": passed, "failed": [] if passed else ["decode"], "file": None}


def one_run(seed):
    """Every idea once, in an order of the seed's, each on the best tree so far: rows by idea."""
    rng, chosen = random.Random(seed), settings()
    trees = {"0": []}
    rows = [{"id": "0", "parent": None, "status": "keep", "ratio_lo": 0.99, "ratio": 1.0}]
    for number, idea in enumerate(rng.sample(IDEAS, len(IDEAS)), 1):
        parent = search.best(rows)
        tree = [*trees[parent], idea]
        trial = Trial(chosen, Machine(rng.getrandbits(32)), gates, list(GATES), Memory())
        row = trial.run(Tree(trees[parent]), Tree(tree), (100, 100 - (idea == "shorter")))
        rows.append(row | {"id": str(number), "parent": parent, "idea": idea})
        trees[str(number)] = tree
    return {row["idea"]: row for row in rows[1:]}


@pytest.fixture(scope="module")
def landscape():
    return [one_run(seed) for seed in range(RUNS)]


@pytest.mark.parametrize("idea", GOOD)
def test_true_gains_are_kept(landscape, idea):
    kept = [run[idea]["status"] == "keep" for run in landscape]
    assert sum(kept) / RUNS >= 0.95


def test_false_keeps_are_rare(landscape):
    tried = [(idea, run[idea]) for run in landscape for idea in FALSE]
    kept = [idea for idea, row in tried if row["status"] == "keep"]
    assert len(kept) / len(tried) <= 0.01
    assert sum(idea in ("half", "zero") for idea in kept) / (2 * RUNS) <= 0.01


def test_each_loss_says_what_it_was(landscape):
    expected = {
        "fake": ("gate_failed", "decode"),
        "greedy": ("discard", "ttft_ms of main"),
        "crash": ("crash", "keep me"),
        "hang": ("timeout", "no answer"),
    }
    for run in landscape:
        for idea, (status, reason) in expected.items():
            assert run[idea]["status"] == status and reason in run[idea]["reason"]


def test_a_large_gain_costs_few_blocks(landscape):
    blocks = [int(run["twenty"]["reason"].split()[-2]) for run in landscape]
    assert sorted(blocks)[RUNS // 2] <= 15

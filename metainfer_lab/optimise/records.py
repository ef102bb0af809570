"""The nouns of an optimisation: its settings, a proposal, a block of runs, a profile."""

from __future__ import annotations

import math
import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from metainfer_lab.bench.workload import Workload
from metainfer_lab.optimise.sequential import Rule, least_blocks
from metainfer_lab.spec import Spec

MAIN = "main"
OBJECTIVE = "decode_tok_s"
METRICS = ("decode_tok_s", "ttft_ms", "output_tok_s")
GUARDED = {MAIN: ("ttft_ms",)}  # what a guard asks of a workload; of the others: output_tok_s
LONG_PROMPT, LONG_OUTPUT = 512, 16
PRINTABLE = re.compile(r"[^\x20-\x7e]+")


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Settings(Record):
    """What a run is held to from its first attempt to its last; kept in settings.json.

    threshold: gain that a keep must exceed; guard: most that a keep may cost another metric;
    attempts, patience, floor_share: the stop rules; start_run, start_tree: what was optimised.
    """

    threshold: float = Field(default=0.01, ge=0, lt=1)
    guard: float = Field(default=0.05, gt=0, lt=1)
    alpha_keep: float = Field(default=0.005, gt=0, le=0.05)
    alpha_discard: float = Field(default=0.05, gt=0, le=0.2)
    blocks: int = Field(default=160, ge=12, le=1000, description="most blocks of one comparison")
    final_blocks: int = Field(default=40, ge=12, le=1000)
    attempts: int = Field(default=30, ge=1)
    patience: int = Field(default=5, ge=1, description="attempts from one tree without a keep")
    lines: int = Field(default=2, ge=1, description="trees that may be exhausted before the end")
    floor_share: float = Field(default=0.95, gt=0, le=1)
    cheap_gates: list[str] = ["alone", "logits"]
    workloads: dict[str, Workload]
    start_run: str | None = None
    start_tree: str = ""

    @property
    def rule(self) -> Rule:
        """The rule of a comparison with the current best."""
        levels = self.alpha_keep, self.alpha_discard
        change = self.threshold, self.threshold
        return Rule(*change, *levels, self.blocks, least_blocks(min(levels)))

    @property
    def final_rule(self) -> Rule:
        """All keeps together against the start: faster at all, over a fixed number of blocks."""
        levels, blocks = (self.alpha_keep, self.alpha_discard), self.final_blocks
        return Rule(0.0, self.threshold, *levels, blocks, blocks)


def workloads_of(spec: Spec) -> dict[str, Workload]:
    """The spec's own traffic, which is optimised, and others that guard it.

    long: a prompt several times as long with a short answer; single: one stream alone.
    """
    main, most = Workload.from_spec(spec), spec.workload.max_context
    found = {MAIN: main}
    prompt = min(max(LONG_PROMPT, 4 * main.prompt_len), most - LONG_OUTPUT)
    if prompt > main.prompt_len:
        changed = {"prompt_len": prompt, "output_len": LONG_OUTPUT, "concurrency": 1}
        found["long"] = main.model_copy(update=changed)
    if main.concurrency > 1:
        found["single"] = main.model_copy(update={"concurrency": 1})
    return found


class Proposal(Record):
    """One change, as its author announces it. Must be the last call of a reply.

    hypothesis: what was changed and why it should be faster; predicted_ratio: new over old decode
    rate; assumes: files whose present text the idea rests on (those that it edits when left out):
    should a kept change alter one of them, a discarded idea is listed again.
    """

    hypothesis: str = Field(min_length=10, max_length=600)
    predicted_ratio: float = Field(gt=0, le=100)
    assumes: list[str] = Field(default=[], max_length=20)

    @property
    def line(self) -> str:
        """The hypothesis on one line."""
        return one_line(self.hypothesis, 300)


class Block(Record):
    """Four runs on one batch of prompts: parent, candidate, candidate, parent (or the reverse).

    Values by metric, two of each; `same_tokens`: share of greedy tokens on which both agree.
    """

    workload: str
    parent: dict[str, tuple[float, float]]
    candidate: dict[str, tuple[float, float]]
    same_tokens: float = Field(ge=0, le=1)

    def gain(self, metric: str) -> float:
        """Log-ratio, positive where the candidate is better; a linear drift cancels in it."""
        new, old = (sum(map(math.log, side[metric])) for side in (self.candidate, self.parent))
        return (old - new if metric.endswith("_ms") else new - old) / 2


class Target(Record):
    """A part of a decode step. us: time a step; floor_us: of reading its weights once, where the
    operator's arguments tell how many bytes those are."""

    name: str
    us: float = Field(ge=0)
    calls: float = Field(ge=0)
    floor_us: float | None = None

    @property
    def gap_us(self) -> float:
        """What could be won at most."""
        return max(0.0, self.us - (self.floor_us or 0.0))


class Profile(Record):
    """Where a decode step's time goes; `floor_us`: the roofline of the whole step."""

    step_us: float = Field(gt=0)
    floor_us: float = Field(gt=0)
    targets: list[Target]

    def ranked(self) -> list[tuple[Target, float]]:
        """Targets by what winning their gap would give: the step's speed-up by Amdahl's law."""
        by_gap = sorted(self.targets, key=lambda target: -target.gap_us)
        return [(t, 1 / max(1e-9, 1 - t.gap_us / self.step_us)) for t in by_gap]


def one_line(text: Any, limit: int) -> str:
    """Untrusted text for a table: printable ASCII, one line, cut where it is too long."""
    clean = " ".join(PRINTABLE.sub(" ", str(text)).split())
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."

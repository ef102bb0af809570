"""Limits of a run, and what a call costs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from metainfer_lab.agent.transcript import Line
from metainfer_lab.errors import InputError
from metainfer_lab.spec import explain

# US dollars per million tokens, input and output, as published on the date below.
PRICES_AS_OF = "2026-11"
PRICES: dict[str, tuple[float, float]] = {
    "claude-opus-5-5": (4.0, 20.0),
    "claude-sonnet-5-5": (2.0, 10.0),
    "claude-haiku-5-5": (0.1, 0.5),
    "claude-fable-5-2": (8.0, 40.0),
}
CACHE_WRITE, CACHE_READ = 1.25, 0.1  # shares of the input price
COUNTED = (
    "input_tokens",
    "output_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
)


class BudgetSpent(Exception):
    """A limit was reached; the run stops and can go on with a larger one."""


class Budget(BaseModel):
    """Limits; None means none. tokens counts input and output, cached input included."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    turns: int = Field(default=300, ge=1)
    attempts: int = Field(default=8, ge=1, description="submissions per phase")
    rejections: int = Field(default=3, ge=1, description="reviews that may send a phase back")
    wall_s: float | None = Field(default=None, gt=0)
    tokens: int | None = Field(default=None, gt=0)
    budget_usd: float | None = Field(default=None, gt=0)

    @classmethod
    def of(cls, **limits: float | None) -> Budget:
        """A budget of a caller's numbers; InputError names one that makes no sense."""
        try:
            return cls(**limits)
        except ValidationError as error:
            raise InputError(explain(error)) from None

    def check(
        self, lines: list[Line], started: float, next_input: int, next_output: int, model: str
    ) -> None:
        """Raise BudgetSpent when the next call could cross a limit.

        started: time.monotonic() when this process took the run up; next_input, next_output:
        most tokens of the call.
        """
        replies = sum(line.author == "assistant" for line in lines)
        spent_s = sum(line.seconds for line in lines)
        used = sum(sum(line.usage.values()) for line in lines if line.usage)
        if replies >= self.turns:
            raise BudgetSpent(f"turns: all {self.turns} are used")
        if self.wall_s is not None and max(spent_s, time.monotonic() - started) >= self.wall_s:
            raise BudgetSpent(f"wall_s: {spent_s:.0f} s of {self.wall_s:.0f} s are used")
        if self.tokens is not None and used + next_input + next_output > self.tokens:
            raise BudgetSpent(
                f"tokens: {used} of {self.tokens} are used and the next call may not fit"
            )
        if self.budget_usd is not None:
            worst = (
                cost(model, {"input_tokens": next_input, "output_tokens": next_output})
                * CACHE_WRITE
            )
            spent, most = total_cost(lines) or 0.0, self.budget_usd
            if spent + worst > most:
                raise BudgetSpent(
                    f"budget_usd: {spent:.2f} of {most:.2f} spent, the next call may not fit"
                )


def cost(model: str, usage: dict[str, int]) -> float:
    """US dollars of one call; InputError when the model has no price here."""
    if model not in PRICES:
        raise InputError(
            f"model {model}: no price known ({PRICES_AS_OF}); known are {', '.join(PRICES)}"
        )
    price_in, price_out = PRICES[model]
    written, read = usage.get(COUNTED[2], 0), usage.get(COUNTED[3], 0)
    units = usage.get("input_tokens", 0) + CACHE_WRITE * written + CACHE_READ * read
    return (units * price_in + usage.get("output_tokens", 0) * price_out) / 1e6


def total_cost(lines: Iterable[Line]) -> float | None:
    """US dollars of all lines; None when no API said a usage."""
    costs = [cost(line.model, line.usage) for line in lines if line.usage and line.model]
    return sum(costs) if costs else None


def counted(usage: Any) -> dict[str, int]:
    """The four counts of an SDK usage object that cost money."""
    return {name: getattr(usage, name, None) or 0 for name in COUNTED}

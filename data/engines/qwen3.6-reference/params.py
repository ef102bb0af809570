"""What a request may ask for; anything else is a ValueError that names it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any


@dataclass(frozen=True)
class Params:
    """Sampling parameters with their defaults; temperature 0 is greedy, top_k 0 is off."""

    max_new_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = 0

    @classmethod
    def parse(cls, given: dict[str, Any], vocab_size: int) -> "Params":
        """Checked parameters of a request."""
        for name in given:
            if name not in {f.name for f in fields(cls)}:
                raise ValueError(f"{name}: not a sampling parameter")
        params = cls(**given)
        for name, (kind, accepts, wanted) in RULES.items():
            value = getattr(params, name)
            if not (is_number(value, kind) and accepts(value)):
                raise ValueError(f"{name}: {value!r} is not {wanted}")
        if params.min_tokens > params.max_new_tokens:
            raise ValueError(f"min_tokens: {params.min_tokens} is above max_new_tokens")
        params._check_others(vocab_size)
        return params

    def _check_others(self, vocab_size: int) -> None:
        if self.seed is not None and not (
            is_number(self.seed, Integral) and 0 <= self.seed < 2**63
        ):
            raise ValueError(f"seed: {self.seed!r} is not an integer from 0 to 2**63 - 1")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos: {self.ignore_eos!r} is not true or false")
        for name, kind in (("logit_bias", dict), ("stop_token_ids", list | tuple)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name}: {getattr(self, name)!r} is of the wrong type")
            for token in getattr(self, name):
                if not (is_number(token, Integral) and 0 <= token < vocab_size):
                    raise ValueError(f"{name}: {token!r} is not a token id below {vocab_size}")
        for bias in self.logit_bias.values():
            if not is_number(bias, Real):
                raise ValueError(f"logit_bias: {bias!r} is not a finite number")


def is_number(value: Any, kind: type) -> bool:
    """A finite number of a kind; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)


RULES: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "max_new_tokens": (Integral, lambda v: v >= 1, "an integer of at least 1"),
    "min_tokens": (Integral, lambda v: v >= 0, "an integer of at least 0"),
    "temperature": (Real, lambda v: v >= 0, "a number of at least 0"),
    "top_p": (Real, lambda v: 0 < v <= 1, "a number above 0 and at most 1"),
    "top_k": (Integral, lambda v: v >= 0, "an integer of at least 0"),
    "min_p": (Real, lambda v: 0 <= v <= 1, "a number from 0 to 1"),
    "presence_penalty": (Real, lambda v: -2 <= v <= 2, "a number from -2 to 2"),
    "frequency_penalty": (Real, lambda v: -2 <= v <= 2, "a number from -2 to 2"),
    "repetition_penalty": (Real, lambda v: v > 0, "a number above 0"),
    "logprobs": (Integral, lambda v: 0 <= v <= 20, "an integer from 0 to 20"),
}

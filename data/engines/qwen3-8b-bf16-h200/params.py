"""Sampling parameters of a request, checked by name before anything changes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Self


@dataclass(frozen=True)
class SamplingParams:
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
    def parse(cls, params: dict[str, Any], vocab_size: int) -> Self:
        """Checked parameters; ValueError names the one that is unknown or out of range."""
        known = {f.name for f in fields(cls)}
        for name in params:
            if name not in known:
                raise ValueError(
                    f"params: {name} is not known; known are {', '.join(sorted(known))}"
                )
        values = {name: _checked(name, value, vocab_size) for name, value in params.items()}
        parsed = cls(**values)
        if parsed.min_tokens > parsed.max_new_tokens:
            raise ValueError("params: min_tokens must not be above max_new_tokens")
        return parsed

    @property
    def reshapes(self) -> bool:
        """Whether the token is anything but the arg max of the model's logits."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1
        return self.temperature > 0 or any(penalties) or bool(self.logit_bias)


INTEGERS = {
    "max_new_tokens": (1, math.inf),
    "min_tokens": (0, math.inf),
    "top_k": (0, math.inf),
    "seed": (0, 2**63 - 1),
    "logprobs": (0, 20),
}
REALS = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, math.inf),
}
ABOVE_ZERO = ("top_p", "repetition_penalty")


def _checked(name: str, value: Any, vocab_size: int) -> Any:
    if name == "seed" and value is None:
        return None
    if name in INTEGERS:
        return _integer(name, value, *INTEGERS[name])
    if name in REALS:
        return _real(name, value, *REALS[name])
    if name == "ignore_eos":
        if not isinstance(value, bool):
            raise ValueError(f"params: ignore_eos must be true or false, not {value!r}")
        return value
    if name == "stop_token_ids":
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError("params: stop_token_ids must be a list of token ids")
        return tuple(_integer(name, token, 0, vocab_size - 1) for token in value)
    if not isinstance(value, dict):
        raise ValueError("params: logit_bias must map token ids to numbers")
    return {
        _integer(name, token, 0, vocab_size - 1): _real(name, bias, -math.inf, math.inf)
        for token, bias in value.items()
    }


def _integer(name: str, value: Any, low: float, high: float) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= value <= high:
        raise ValueError(f"params: {name} must be an integer from {low} to {high}, not {value!r}")
    return int(value)


def _real(name: str, value: Any, low: float, high: float) -> float:
    real = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not real or not low <= value <= high or (name in ABOVE_ZERO and value == 0):
        raise ValueError(f"params: {name} must be a number from {low} to {high}, not {value!r}")
    return float(value)


def checked_tokens(tokens: Any, vocab_size: int, most: int, why: str) -> list[int]:
    """A copy of the token ids; ValueError names `tokens`."""
    tokens = list(tokens)
    if not tokens:
        raise ValueError("tokens: empty; give at least one token id")
    kinds = {kind for kind in set(map(type, tokens)) if issubclass(kind, Integral)} - {bool}
    for token in tokens:
        if type(token) not in kinds or not 0 <= token < vocab_size:
            raise ValueError(f"tokens: {token!r} is no token id below {vocab_size}")
    if len(tokens) > most:
        raise ValueError(f"tokens: {len(tokens)} of them, at most {most} fit ({why})")
    return [int(token) for token in tokens]

"""Sampling parameters of a request, checked."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any


@dataclass(frozen=True)
class SamplingParams:
    """What a request may ask for, with the defaults."""

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
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int = 0


NAMES = frozenset(each.name for each in fields(SamplingParams))
# Lowest and highest value; open ends are checked apart.
INTEGERS = {
    "max_new_tokens": (1, math.inf),
    "min_tokens": (0, math.inf),
    "top_k": (0, math.inf),
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


def parse_params(params: Mapping[str, Any], vocab_size: int) -> SamplingParams:
    """A checked copy of a request's params; ValueError names the one at fault."""
    if not isinstance(params, Mapping):
        raise ValueError("params must be a dict")
    for name in params:
        if name not in NAMES:
            raise ValueError(f"unknown parameter {name!r}")
    parsed = SamplingParams(**{name: _parse(name, params[name], vocab_size) for name in params})
    if parsed.min_tokens > parsed.max_new_tokens:
        raise ValueError(f"min_tokens {parsed.min_tokens} is above the most tokens allowed")
    return parsed


def parse_integer(name: str, value: Any, low: float, high: float) -> int:
    """value as an int in [low, high]; ValueError names it otherwise. A bool is not a number."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, not {value!r}")
    return int(value)


def parse_ids(name: str, values: Any, vocab_size: int) -> list[int]:
    """A list of token ids; ValueError names the argument when one is not in the vocabulary."""
    if not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list of token ids")
    return [parse_integer(name, value, 0, vocab_size - 1) for value in values]


def _parse(name: str, value: Any, vocab_size: int) -> Any:
    if name in INTEGERS:
        return parse_integer(name, value, *INTEGERS[name])
    if name in REALS:
        return _real(name, value)
    if name == "logit_bias":
        return _bias(name, value, vocab_size)
    if name == "stop_token_ids":
        return frozenset(parse_ids(name, value, vocab_size))
    if name == "seed":
        return None if value is None else parse_integer(name, value, 0, 2**63 - 1)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")
    return value


def _real(name: str, value: Any) -> float:
    number = _finite(name, value)
    low, high = REALS[name]
    if not low <= number <= high or (name in ABOVE_ZERO and number == 0):
        raise ValueError(f"{name} {number} is out of range")
    return number


def _finite(name: str, value: Any) -> float:
    """value as a finite float; a number too large for one is refused like an infinite one."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite")
    return number


def _bias(name: str, value: Any, vocab_size: int) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict of token ids")
    ids = parse_ids(name, value.keys(), vocab_size)
    return dict(zip(ids, (_finite(name, bias) for bias in value.values()), strict=True))

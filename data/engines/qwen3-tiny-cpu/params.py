"""Sampling parameters of one request."""

import math
from dataclasses import dataclass, field

from .checks import boolean, integer, integers, number

_POSITIVE = math.ulp(0.0)  # the smallest float above 0, for ranges that exclude 0
_INTEGERS = {
    "max_new_tokens": (1, None),
    "min_tokens": (0, None),
    "top_k": (0, None),
    "logprobs": (0, 20),
}
_NUMBERS = {
    "temperature": (0.0, math.inf),
    "top_p": (_POSITIVE, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (_POSITIVE, math.inf),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked parameters; temperature 0 is greedy, top_k 0 keeps all, seed None is random."""

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


def parse_params(params: object, vocab_size: int) -> SamplingParams:
    """Check and copy a request's params. ValueError names the parameter at fault."""
    if not isinstance(params, dict):
        raise ValueError("params must be a dict")
    parsed = SamplingParams(
        **{name: _parse(name, value, vocab_size) for name, value in params.items()}
    )
    if parsed.min_tokens > parsed.max_new_tokens:
        raise ValueError("min_tokens is more than the tokens that may be produced")
    return parsed


def _parse(name: object, value: object, vocab_size: int) -> object:
    """The checked value of one parameter."""
    if name in _INTEGERS:
        return integer(name, value, *_INTEGERS[name])
    if name in _NUMBERS:
        return number(name, value, *_NUMBERS[name])
    if name == "ignore_eos":
        return boolean(name, value)
    if name == "seed":
        return None if value is None else integer(name, value, 0, 2**63 - 1)
    if name == "stop_token_ids":
        return frozenset(integers(name, value, vocab_size))
    if name == "logit_bias":
        return _parse_bias(value, vocab_size)
    raise ValueError(f"params: {name} is unknown")


def _parse_bias(value: object, vocab_size: int) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("logit_bias must be a dict")
    ids = integers("logit_bias", value.keys(), vocab_size)
    return {
        token: number("logit_bias", bias, -math.inf)
        for token, bias in zip(ids, value.values(), strict=True)
    }

"""Sampling parameters of one request, checked when it is submitted."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .checks import id_list, integer, number

_MAX_LOGPROBS = 20
_Check = Callable[[str, Any, int], Any]  # (name, value, vocab_size) -> value, or ValueError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request may ask for; the defaults are greedy decoding of 16 tokens."""

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


def parse_params(params: Any, vocab_size: int) -> SamplingParams:
    """Check and copy a dict of parameters; ValueError naming the first that is wrong."""
    if not isinstance(params, dict):
        raise ValueError(f"params must be a dict, not {params!r}")
    for name in params:
        if name not in _CHECKS:
            raise ValueError(f"unknown parameter {name!r}")
    checked = {name: _CHECKS[name](name, value, vocab_size) for name, value in params.items()}
    result = SamplingParams(**checked)
    if result.min_tokens > result.max_new_tokens:
        raise ValueError(f"min_tokens must not exceed max_new_tokens ({result.max_new_tokens})")
    return result


def _whole(low: int, high: int | None = None) -> _Check:
    def check(name: str, value: Any, vocab_size: int) -> int:
        return integer(name, value, low, high)

    return check


def _real(accepts: Callable[[float], bool], wanted: str) -> _Check:
    def check(name: str, value: Any, vocab_size: int) -> float:
        result = number(name, value)
        if not accepts(result):
            raise ValueError(f"{name} must be {wanted}, not {result}")
        return result

    return check


def _seed(name: str, value: Any, vocab_size: int) -> int | None:
    return None if value is None else integer(name, value, 0, 2**63 - 1)


def _flag(name: str, value: Any, vocab_size: int) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be a bool, not {value!r}")
    return value


def _ids(name: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    return tuple(id_list(name, value, vocab_size))


def _bias(name: str, value: Any, vocab_size: int) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a dict, not {value!r}")
    return {
        integer(name, token, 0, vocab_size - 1): number(name, bias) for token, bias in value.items()
    }


_CHECKS: dict[str, _Check] = {
    "max_new_tokens": _whole(1),
    "min_tokens": _whole(0),
    "temperature": _real(lambda x: x >= 0, "at least 0"),
    "top_p": _real(lambda x: 0 < x <= 1, "in (0, 1]"),
    "top_k": _whole(0),
    "min_p": _real(lambda x: 0 <= x <= 1, "in [0, 1]"),
    "presence_penalty": _real(lambda x: -2 <= x <= 2, "in [-2, 2]"),
    "frequency_penalty": _real(lambda x: -2 <= x <= 2, "in [-2, 2]"),
    "repetition_penalty": _real(lambda x: x > 0, "above 0"),
    "logit_bias": _bias,
    "seed": _seed,
    "stop_token_ids": _ids,
    "ignore_eos": _flag,
    "logprobs": _whole(0, _MAX_LOGPROBS),
}

"""Sampling parameters of a request, checked."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .checks import check_ids, is_int, is_number


@dataclass(frozen=True, slots=True)
class Params:
    """What a request asks for; the engine contract's names, defaults and ranges."""

    max_new_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[Tensor, Tensor] | None = None  # ids [n], biases [n]
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = 0


NAMES = frozenset(field.name for field in fields(Params))
UNBOUNDED = float("inf")
INTEGERS = {
    "max_new_tokens": (1, UNBOUNDED),
    "min_tokens": (0, UNBOUNDED),
    "top_k": (0, UNBOUNDED),
    "logprobs": (0, 20),
}
NUMBERS = {
    "temperature": (0, UNBOUNDED),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, UNBOUNDED),
}
ABOVE_ZERO = ("top_p", "repetition_penalty")


def read_params(given: dict, vocab_size: int) -> Params:
    """Check and copy a dict of parameters; ValueError names the one at fault."""
    if not isinstance(given, dict):
        raise ValueError("params must be a dict")
    checked = {name: _check(name, value, vocab_size) for name, value in given.items()}
    params = Params(**checked)
    if params.min_tokens > params.max_new_tokens:
        raise ValueError(f"min_tokens {params.min_tokens} exceeds the most tokens asked for")
    return params


def _check(name: str, value: object, vocab_size: int) -> object:
    """The checked copy of one parameter's value."""
    if name not in NAMES:
        raise ValueError(f"unknown parameter {name!r}")
    if name in INTEGERS or name in NUMBERS:
        return _check_number(name, value)
    if name == "logit_bias":
        return _check_bias(value, vocab_size)
    if name == "stop_token_ids":
        return tuple(check_ids(name, value, vocab_size))
    if name == "ignore_eos" and not isinstance(value, bool):
        raise ValueError(f"ignore_eos must be a bool, not {value!r}")
    if name == "seed" and value is not None and not (is_int(value) and 0 <= value < 2**63):
        raise ValueError(f"seed must be None or an integer in [0, 2**63), not {value!r}")
    return value


def _check_number(name: str, value: object) -> int | float:
    """A number within its range; only integers where the parameter counts something."""
    integer = name in INTEGERS
    low, high = INTEGERS[name] if integer else NUMBERS[name]
    if not (is_int(value) if integer else is_number(value)):
        raise ValueError(f"{name} must be a finite {'integer' if integer else 'number'}: {value!r}")
    if not low <= value <= high or (name in ABOVE_ZERO and value == 0):
        raise ValueError(f"{name} is out of range: {value!r}")
    return int(value) if integer else float(value)


def _check_bias(value: object, vocab_size: int) -> tuple[Tensor, Tensor] | None:
    """logit_bias as tensors of ids and biases, within float32 so that no sum becomes NaN."""
    if not isinstance(value, dict):
        raise ValueError("logit_bias must be a dict of token ids to numbers")
    ids = check_ids("logit_bias", list(value), vocab_size)
    if not all(is_number(bias) for bias in value.values()):
        raise ValueError("logit_bias holds a bias that is no finite number")
    if not ids:
        return None
    largest = torch.finfo(torch.float32).max
    biases = torch.tensor([float(bias) for bias in value.values()], dtype=torch.float64)
    return torch.tensor(ids), biases.clamp_(-largest, largest).to(torch.float32)

"""Sampling parameters of a request: defaults and checks."""

from dataclasses import dataclass, field, fields

import torch

from .checks import boolean, integer, integers, number

LARGEST = torch.finfo(torch.float32).max
SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Params:
    """Checked parameters; the names are those of `submit`."""

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
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int = 0

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens change the logits."""
        neutral = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return neutral != (0.0, 0.0, 1.0)


def _logit_bias(value: object, vocab_size: int) -> dict[int, float]:
    """{id: bias}, each bias within float32."""
    if not isinstance(value, dict):
        raise ValueError("logit_bias must be a dict of an id to a number")
    ids = [integer("logit_bias", token, 0, vocab_size - 1) for token in value]
    biases = [number("logit_bias", bias) for bias in value.values()]
    return {i: min(max(b, -LARGEST), LARGEST) for i, b in zip(ids, biases, strict=True)}


def _top_p(value: object) -> float:
    """Within (0, 1]."""
    if number("top_p", value, 0.0, 1.0) == 0.0:
        raise ValueError("top_p must be above 0")
    return float(value)


def _repetition_penalty(value: object) -> float:
    """Above 0, within float32."""
    name = "repetition_penalty"
    if number(name, value, 0.0) == 0.0:
        raise ValueError(f"{name} must be above 0")
    return min(max(float(value), SMALLEST), LARGEST)


def read_params(given: object, vocab_size: int) -> Params:
    """Check a request's params; ValueError names the one at fault."""
    if not isinstance(given, dict):
        raise ValueError("params must be a dict")
    known = {one.name for one in fields(Params)}
    for name in given:
        if name not in known:
            raise ValueError(f"params holds an unknown key, {name!r:.60}")
    most = integer("max_new_tokens", given.get("max_new_tokens", Params.max_new_tokens), 1)
    checks = {
        "max_new_tokens": lambda value: most,
        "min_tokens": lambda value: integer("min_tokens", value, 0, most),
        "temperature": lambda value: number("temperature", value, 0.0),
        "top_p": _top_p,
        "top_k": lambda value: integer("top_k", value, 0),
        "min_p": lambda value: number("min_p", value, 0.0, 1.0),
        "presence_penalty": lambda value: number("presence_penalty", value, -2.0, 2.0),
        "frequency_penalty": lambda value: number("frequency_penalty", value, -2.0, 2.0),
        "repetition_penalty": _repetition_penalty,
        "logit_bias": lambda value: _logit_bias(value, vocab_size),
        "seed": lambda value: None if value is None else integer("seed", value, 0, 2**63 - 1),
        "stop_token_ids": lambda value: integers("stop_token_ids", value, vocab_size),
        "ignore_eos": lambda value: boolean("ignore_eos", value),
        "logprobs": lambda value: integer("logprobs", value, 0, 20),
    }
    return Params(**{name: checks[name](value) for name, value in given.items()})

"""Sampling parameters of a request, checked on arrival."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from .config import is_int, is_number

PENALTY_LIMIT = 2.0
MAX_LOGPROBS = 20
SEED_LIMIT = 2**63


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when a request ends; temperature 0 is greedy."""

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
    def edits_logits(self) -> bool:
        """Whether the choice looks at anything but the raw logits' order."""
        neutral = self.presence_penalty == self.frequency_penalty == 0.0
        neutral = neutral and self.repetition_penalty == 1.0
        return not neutral or bool(self.logit_bias) or self.min_tokens > 0


def parse_params(params: dict[str, Any], vocab_size: int) -> SamplingParams:
    """A checked copy of params; ValueError names the parameter that is wrong."""
    if not isinstance(params, dict):
        raise ValueError("params must be a dict")
    known = {item.name for item in fields(SamplingParams)}
    for name in params:
        if name not in known:
            raise ValueError(f"unknown parameter {name!r}")
    given = dict(params)
    if "logit_bias" in given:
        given["logit_bias"] = _check_bias(given["logit_bias"], vocab_size)
    if "stop_token_ids" in given:
        given["stop_token_ids"] = _check_stops(given["stop_token_ids"], vocab_size)
    parsed = SamplingParams(**given)
    _check_integers(parsed)
    _check_numbers(parsed)
    return parsed


def check_tokens(tokens: Iterable[int], vocab_size: int) -> list[int]:
    """A checked copy of token ids; ValueError names `tokens`."""
    try:
        ids = list(tokens)
    except TypeError as error:
        raise ValueError("tokens must be a list of ids") from error
    if not ids:
        raise ValueError("tokens must not be empty")
    if not all(is_int(token) and 0 <= token < vocab_size for token in ids):
        raise ValueError(f"tokens must be integers in [0, {vocab_size})")
    return [int(token) for token in ids]


def _require(ok: bool, name: str, rule: str) -> None:
    """Raise ValueError naming the parameter unless ok."""
    if not ok:
        raise ValueError(f"{name} must be {rule}")


def _check_integers(given: SamplingParams) -> None:
    """Counts, flags and the seed."""
    for name, low in (("max_new_tokens", 1), ("min_tokens", 0), ("top_k", 0), ("logprobs", 0)):
        value = getattr(given, name)
        _require(is_int(value) and value >= low, name, f"an integer of at least {low}")
    _require(given.min_tokens <= given.max_new_tokens, "min_tokens", "at most max_new_tokens")
    _require(given.logprobs <= MAX_LOGPROBS, "logprobs", f"at most {MAX_LOGPROBS}")
    _require(isinstance(given.ignore_eos, bool), "ignore_eos", "a bool")
    seed = given.seed
    known = seed is None or (is_int(seed) and 0 <= seed < SEED_LIMIT)
    _require(known, "seed", "None or an integer in [0, 2**63)")


def _check_numbers(given: SamplingParams) -> None:
    """Real-valued parameters and their ranges."""
    penalties = ("presence_penalty", "frequency_penalty")
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", *penalties):
        _require(is_number(getattr(given, name)), name, "a finite number")
    _require(given.temperature >= 0, "temperature", "at least 0")
    _require(0 < given.top_p <= 1, "top_p", "in (0, 1]")
    _require(0 <= given.min_p <= 1, "min_p", "in [0, 1]")
    _require(given.repetition_penalty > 0, "repetition_penalty", "above 0")
    for name in penalties:
        _require(abs(getattr(given, name)) <= PENALTY_LIMIT, name, "in [-2, 2]")


def _check_bias(bias: object, vocab_size: int) -> dict[int, float]:
    """A copy of logit_bias."""
    _require(isinstance(bias, dict), "logit_bias", "a dict of id to bias")
    for token, value in bias.items():
        inside = is_int(token) and 0 <= token < vocab_size
        _require(inside, "logit_bias", f"keyed by ids in [0, {vocab_size})")
        _require(is_number(value), "logit_bias", "a finite number for each id")
    return {int(token): float(value) for token, value in bias.items()}


def _check_stops(stops: object, vocab_size: int) -> list[int]:
    """A copy of stop_token_ids."""
    _require(isinstance(stops, list | tuple | set), "stop_token_ids", "a list of ids")
    inside = all(is_int(token) and 0 <= token < vocab_size for token in stops)
    _require(inside, "stop_token_ids", f"integers in [0, {vocab_size})")
    return sorted({int(token) for token in stops})

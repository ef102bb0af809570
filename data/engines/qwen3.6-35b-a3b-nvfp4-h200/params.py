"""Sampling parameters of a request, checked by name."""

from dataclasses import dataclass, field, fields
from math import isfinite
from operator import index

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class Params:
    """How a request is sampled and when it ends."""

    max_new_tokens: int = 128
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

    @property
    def plain(self) -> bool:
        """Whether the captured pick alone serves this request (greedy or pure temperature)."""
        return not (
            self.min_tokens
            or self.top_p < 1
            or self.top_k
            or self.min_p
            or self.counts_tokens
            or self.logit_bias
            or self.logprobs
        )

    @property
    def counts_tokens(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


def whole(value) -> int:
    """An integer of any make; TypeError for fractions, texts and truth values."""
    if isinstance(value, bool):
        raise TypeError("a truth value is no number")
    return index(value)


_WHOLE = dict.fromkeys(("max_new_tokens", "min_tokens", "top_k", "logprobs"), whole)
_REAL = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
READERS = _WHOLE | dict.fromkeys((*_REAL, "repetition_penalty"), float)
READERS |= {
    "seed": lambda seed: None if seed is None else whole(seed),
    "ignore_eos": bool,
    "stop_token_ids": lambda ids: tuple(whole(i) for i in ids),
    "logit_bias": lambda bias: {int(k): float(v) for k, v in bias.items()},  # JSON has text keys
}


def read_params(params: dict | None, vocab: int) -> Params:
    """Params from a plain dict; ValueError names an unknown or impossible argument."""
    given = dict(params or {})
    known = {f.name for f in fields(Params)}
    for name in given:
        if name not in known:
            raise ValueError(f"params.{name}: not supported; known are {', '.join(sorted(known))}")
    given["stop_token_ids"] = tuple(given.get("stop_token_ids") or ())
    given["logit_bias"] = given.get("logit_bias") or {}
    given["logprobs"] = given.get("logprobs") or 0
    for name in given:
        try:
            given[name] = READERS[name](given[name])
        except (TypeError, ValueError, AttributeError):
            raise ValueError(f"params.{name}: {given[name]!r} is of the wrong kind") from None
    result = Params(**given)
    _check(result, vocab)
    return result


def _check(p: Params, vocab: int) -> None:
    ranges = {
        "max_new_tokens": p.max_new_tokens >= 1,
        "min_tokens": 0 <= p.min_tokens <= p.max_new_tokens,
        "temperature": 0 <= p.temperature < float("inf"),
        "top_p": 0 < p.top_p <= 1,
        "top_k": p.top_k >= 0,
        "min_p": 0 <= p.min_p <= 1,
        "presence_penalty": -2 <= p.presence_penalty <= 2,
        "frequency_penalty": -2 <= p.frequency_penalty <= 2,
        "repetition_penalty": 0 < p.repetition_penalty < float("inf"),
        "logprobs": 0 <= p.logprobs <= MAX_LOGPROBS,
        "logit_bias": all(0 <= t < vocab and isfinite(b) for t, b in p.logit_bias.items()),
        "stop_token_ids": all(0 <= t < vocab for t in p.stop_token_ids),
        "seed": p.seed is None or (isinstance(p.seed, int) and 0 <= p.seed < 2**63),
    }
    for name, good in ranges.items():
        if not good:
            raise ValueError(f"params.{name}: {getattr(p, name)!r} is out of range")

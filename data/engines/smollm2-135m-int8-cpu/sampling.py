"""From logits to tokens: penalties, filters, draws and log-probabilities."""

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from .params import SamplingParams


class Choice(NamedTuple):
    """A sampled token with its log-probability under the raw distribution."""

    token: int
    logprob: float
    top_logprobs: list[tuple[int, float]] | None


class Sampler:
    """Chooses the tokens of one request; owns its counts and its random state."""

    def __init__(self, params: SamplingParams, prompt: list[int], end_tokens: list[int]) -> None:
        """`end_tokens` are the ids that min_tokens holds back."""
        self._params = params
        self._end_tokens = end_tokens
        self._seen = set(prompt)
        self._counts: Counter[int] = Counter()
        self._produced = 0
        self._generator = None if params.temperature == 0 else _generator(params.seed)

    def choose(self, logits: Tensor) -> Choice:
        """Sample the next token from the float32 logits [V] of the last position."""
        token = self._pick(logits)
        self._counts[token] += 1
        self._seen.add(token)
        self._produced += 1
        norm = logits.logsumexp(0)
        top = self._params.logprobs
        listed = _top(logits - norm, top) if top else None
        return Choice(token, float(logits[token] - norm), listed)

    def _pick(self, logits: Tensor) -> int:
        """The token, without any bookkeeping."""
        if self._params.edits_logits:
            logits = self._edited(logits)
        if self._generator is None:
            return int(logits.argmax())
        return _draw(logits.double(), self._params, self._generator)

    def _edited(self, logits: Tensor) -> Tensor:
        """Penalties, bias and the ban on end tokens; float64 so that no bias overflows."""
        params, z = self._params, logits.double()
        if params.repetition_penalty != 1.0:
            ids = torch.tensor(sorted(self._seen))
            old = z[ids]
            penalty = params.repetition_penalty
            z[ids] = torch.where(old > 0, old / penalty, old * penalty)
        if self._counts and (params.frequency_penalty or params.presence_penalty):
            ids = torch.tensor(list(self._counts))
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float64)
            z[ids] -= params.frequency_penalty * counts + params.presence_penalty
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias))
            z[ids] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float64)
        if self._produced < params.min_tokens and self._end_tokens:
            z[torch.tensor(self._end_tokens)] = -torch.inf
        return z


def _generator(seed: int | None) -> torch.Generator:
    """Random state of one request's own."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def _draw(z: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """Draw from the filtered distribution of float64 logits z [V].

    Every filter keeps a prefix of the descending order, in which equal logits stand by id.
    """
    values, ids = z.sort(descending=True, stable=True)
    if 0 < params.top_k < len(values):
        values = values[: params.top_k]
    # The maximum goes first, so that a tiny temperature cannot overflow.
    weights = (values - values[0]).div_(params.temperature).exp_()
    probs = weights / weights.sum()
    if params.top_p < 1:
        before = probs.cumsum(0) - probs
        probs = probs[: max(1, int((before < params.top_p).sum()))]
    if params.min_p > 0:
        probs = probs[: max(1, int((probs >= params.min_p * probs[0]).sum()))]
    sums = probs.cumsum(0)
    point = torch.rand((), generator=generator, dtype=torch.float64) * sums[-1]
    last = max(0, int(probs.count_nonzero()) - 1)
    return int(ids[min(last, int((sums <= point).sum()))])


def _top(logprobs: Tensor, count: int) -> list[tuple[int, float]]:
    """The `count` largest of [V] with their ids, equal values by id."""
    values, ids = logprobs.sort(descending=True, stable=True)
    return list(zip(ids[:count].tolist(), values[:count].tolist(), strict=True))

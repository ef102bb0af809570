"""From a row of logits to a token."""

import math
import random
from collections.abc import Sequence

import torch

from .params import SamplingParams


class Sampler:
    """One request's rules, counts and random state."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        end_tokens: frozenset[int],
    ) -> None:
        self._params = params
        self._random = random.Random(params.seed)  # seeded by the system when None
        ends = frozenset() if params.ignore_eos else end_tokens
        self._stops = ends | params.stop_token_ids
        self._produced = 0
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.long)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float64)
        self._penalised = (
            params.repetition_penalty != 1
            or params.frequency_penalty != 0
            or params.presence_penalty != 0
        )
        if self._penalised:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[list(prompt)] = True
            self._counts = torch.zeros(vocab_size)

    def sample(self, logits: torch.Tensor) -> tuple[int, str | None]:
        """Token after float32 logits [V], and "stop" or "length" when it is the last one.

        logits are left as they are.
        """
        adjusted = self._adjust(logits)
        greedy = self._params.temperature == 0
        # Of equal values argmax returns the first, hence the lowest id.
        token = int(adjusted.argmax()) if greedy else self._draw(adjusted)
        return token, self._record(token)

    def _record(self, token: int) -> str | None:
        """Count a token; the reason when it ends the request."""
        stop = token in self._stops and self._produced >= self._params.min_tokens
        self._produced += 1
        if self._penalised:
            self._seen[token] = True
            self._counts[token] += 1
        if stop:
            return "stop"
        return "length" if self._produced == self._params.max_new_tokens else None

    def _adjust(self, logits: torch.Tensor) -> torch.Tensor:
        """Penalties, bias and barred ends, in this order, on a copy when there are any."""
        params, barred = self._params, self._stops and self._produced < self._params.min_tokens
        if not (self._penalised or params.logit_bias or barred):
            return logits
        z = logits.clone()
        if self._penalised:
            factor = params.repetition_penalty
            z = torch.where(self._seen, torch.where(z > 0, z / factor, z * factor), z)
            z -= params.frequency_penalty * self._counts
            z -= params.presence_penalty * (self._counts > 0)
        if params.logit_bias:
            z[self._bias_ids] += self._bias.to(z.dtype)
        if barred:
            z[list(self._stops)] = -math.inf
        return z

    def _draw(self, z: torch.Tensor) -> int:
        """Draw from the filtered distribution by the inverse of its cumulative sum.

        Float64, so that no temperature over- or underflows; the stable sort puts the lower of two
        equal ids first.
        """
        largest = z.max().double()
        if not largest.isfinite():
            return int(z.argmax())
        scaled = (z.double() - largest) / self._params.temperature
        ranked, ids = scaled.sort(descending=True, stable=True)
        chances = self._filter(ranked)
        sums = chances.cumsum(0)
        target = self._random.random() * sums[-1]
        place = int(torch.searchsorted(sums, target, right=True))
        # Rounding may put the target on the last sum: stay on an id that has a chance.
        return int(ids[min(place, int(chances.count_nonzero()) - 1)])

    def _filter(self, ranked: torch.Tensor) -> torch.Tensor:
        """Chances of the ids that top_k, top_p and min_p keep, a prefix of ranked [V]."""
        params = self._params
        if params.top_k:
            ranked = ranked[: params.top_k]
        chances = ranked.softmax(0)
        if params.top_p < 1:
            before = chances.cumsum(0) - chances
            before[0] = 0  # the first is kept, whatever the rounding
            chances = chances[before < params.top_p]
        return chances[chances >= params.min_p * chances[0]]


def likeliest(logprobs: torch.Tensor, count: int) -> list[tuple[int, float]] | None:
    """The count largest of logprobs [V] as (id, logprob), lower id first; None for a count of 0."""
    if not count:
        return None
    ranked, ids = logprobs.sort(descending=True, stable=True)
    return list(zip(ids[:count].tolist(), ranked[:count].tolist(), strict=True))

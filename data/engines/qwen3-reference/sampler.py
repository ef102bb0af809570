"""Logits into a token: penalties, bias, temperature, filters and one draw, in that order."""

import math
from collections import Counter

import torch
from torch import Tensor

from .params import Params


class Sampler:
    """The random state and the token counts of one request."""

    def __init__(self, params: Params, prompt: list[int], end_tokens: frozenset[int]):
        self.params = params
        self.prompt = prompt
        self.end_tokens = end_tokens
        self.counts: Counter[int] = Counter()
        self.generator = torch.Generator()
        self.generator.manual_seed(params.seed)

    def sample(self, logits: Tensor) -> tuple[int, float, list[tuple[int, float]] | None]:
        """A token, its log-probability in the model's own distribution, and the likeliest others.

        logits: float32 [vocab].
        """
        logprobs = logits.log_softmax(dim=-1)
        token = self._choose(self._adjusted(logits))
        self.counts[token] += 1
        return token, logprobs[token].item(), self._top(logprobs)

    def _top(self, logprobs: Tensor) -> list[tuple[int, float]] | None:
        if not self.params.logprobs:
            return None
        values, ids = logprobs.sort(descending=True, stable=True)
        shown = slice(0, self.params.logprobs)
        return list(zip(ids[shown].tolist(), values[shown].tolist(), strict=True))

    def _adjusted(self, logits: Tensor) -> Tensor:
        params, logits = self.params, logits.clone()
        if params.repetition_penalty != 1:
            seen = sorted({*self.prompt, *self.counts})
            scaled = logits[seen]
            above, below = scaled / params.repetition_penalty, scaled * params.repetition_penalty
            logits[seen] = torch.where(scaled > 0, above, below)
        for token, count in self.counts.items():
            logits[token] -= params.frequency_penalty * count + params.presence_penalty
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        if self.counts.total() < params.min_tokens:
            logits[sorted(self.end_tokens)] = -math.inf
        return logits

    def _choose(self, logits: Tensor) -> int:
        params = self.params
        if params.temperature == 0:
            return int(logits.argmax())  # of equal logits, torch documents, the lowest id
        scaled = (logits - logits.max()) / params.temperature
        ordered, ids = scaled.sort(descending=True, stable=True)
        if params.top_k:
            ordered, ids = ordered[: params.top_k], ids[: params.top_k]
        probabilities = ordered.double().softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        kept = probabilities * (before < params.top_p)
        kept = kept / kept.sum()
        kept = kept * (kept >= params.min_p * kept[0])
        return int(ids[self._draw(kept)])

    def _draw(self, weights: Tensor) -> int:
        """An index with probability proportional to its weight, never one of weight zero."""
        cumulative = weights.cumsum(dim=-1)
        uniform = torch.rand((), generator=self.generator, dtype=torch.float64) * cumulative[-1]
        index = int((cumulative <= uniform).sum())
        return min(index, int(weights.nonzero()[-1]))

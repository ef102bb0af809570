"""From the logits of one position to a token and its log-probabilities."""

import math
import random
from collections import Counter

import torch
from torch import Tensor

from .params import SamplingParams


class Sampler:
    """Chooses one request's tokens; owns its counts and its random numbers."""

    def __init__(self, params: SamplingParams, prompt: list[int], stop_ids: set[int]) -> None:
        self._params = params
        self._prompt_ids = set(prompt)
        self._stop_ids = sorted(stop_ids)
        self._counts: Counter[int] = Counter()
        self._random = random.Random(params.seed)

    def choose(self, logits: Tensor) -> int:
        """Choose the next token from logits [V], which stay as they are."""
        scores = self._adjusted(logits)
        # max along a dimension finds the first of equal scores, the first NaN of a broken model.
        peak, first = scores.max(dim=0)
        greedy = self._params.temperature == 0 or not math.isfinite(peak)
        token = int(first) if greedy else self._draw(scores - peak)
        self._counts[token] += 1
        return token

    def _adjusted(self, logits: Tensor) -> Tensor:
        """Penalties, bias and the ban on early ends; logits themselves when none applies."""
        params = self._params
        banned = self._stop_ids if self._counts.total() < params.min_tokens else []
        penalised = params.frequency_penalty != 0 or params.presence_penalty != 0
        if not (params.repetition_penalty != 1 or penalised or params.logit_bias or banned):
            return logits
        scores = logits.clone()
        if params.repetition_penalty != 1:
            ids = list(self._prompt_ids | self._counts.keys())
            old, factor = scores[ids], params.repetition_penalty
            scores[ids] = torch.where(old > 0, old / factor, old * factor)
        if penalised:
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32)
            penalty = params.frequency_penalty * counts + params.presence_penalty
            scores[list(self._counts)] -= penalty
        if params.logit_bias:
            scores[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()))
        scores[banned] = -math.inf
        return scores

    def _draw(self, scores: Tensor) -> int:
        """Filter scores [V], whose maximum is 0, and draw; float64 keeps the sums exact."""
        params = self._params
        scores = scores.double() / params.temperature
        ids = None
        if 0 < params.top_k < len(scores):
            ids = top_ids(scores, params.top_k)
        elif params.top_p < 1:
            ids = scores.sort(descending=True, stable=True).indices
        probs = torch.softmax(scores if ids is None else scores[ids], dim=-1)
        kept = (probs >= params.min_p * probs.max()) & (probs > 0)
        if params.top_p < 1:
            kept &= probs.cumsum(0) - probs < params.top_p
        choices = kept.nonzero().squeeze(1)
        choice = choices[self._pick(probs[choices])]
        return int(choice if ids is None else ids[choice])

    def _pick(self, probs: Tensor) -> int:
        """Index into probs, all above 0 but not normalised, by the inverse of their sums."""
        sums = probs.cumsum(0)
        point = self._random.random() * sums[-1]
        return min(int(torch.searchsorted(sums, point, right=True)), len(probs) - 1)


def top_ids(scores: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest scores [V], descending, equal ones by lower id; count <= V."""
    cut = scores.topk(count).values[-1]
    # Not ">=": NaN must stay among the candidates, so that there are enough of them.
    candidates = (~(scores < cut)).nonzero().squeeze(1)
    order = scores[candidates].sort(descending=True, stable=True).indices
    return candidates[order[:count]]


def top_logprobs(logprobs: Tensor, count: int) -> list[tuple[int, float]]:
    """The `count` most probable (id, logprob) of logprobs [V], as many as there are at most."""
    ids = top_ids(logprobs, min(count, len(logprobs)))
    return list(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))

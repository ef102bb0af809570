"""From logits to tokens."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .params import Params
from .scheduler import Request

# The least positive normal float32: no temperature below it can be told from it.
SMALLEST = torch.finfo(torch.float32).tiny


class Sample(NamedTuple):
    """A sampled token with its log-probability under the model's own distribution."""

    token: int
    logprob: float
    top_logprobs: list[tuple[int, float]] | None


def sample(logits: Tensor, requests: list[Request]) -> list[Sample]:
    """Sample one token for each row of logits [B, V], which are overwritten.

    Greedy rows take the largest logit, of equal ones the lowest id (what argmax promises).
    """
    logprobs = torch.log_softmax(logits, -1)
    for row, request in zip(logits, requests, strict=True):
        adjust(row, request)
    tokens = logits.argmax(-1).tolist()
    for i, request in enumerate(requests):
        if request.params.temperature > 0:
            tokens[i] = draw(logits[i], request.params, request.random.random())
    chosen = logprobs.gather(1, torch.tensor(tokens, dtype=torch.int64).unsqueeze(1)).flatten().tolist()
    tops = [top(row, r.params.logprobs) for row, r in zip(logprobs, requests, strict=True)]
    return [Sample(*parts) for parts in zip(tokens, chosen, tops, strict=True)]


def adjust(logits: Tensor, request: Request) -> None:
    """Apply penalties, bias and min_tokens to one row [V] in place.

    Sources: Keskar et al. 2019 (repetition), OpenAI API reference (frequency and presence).
    """
    params = request.params
    if params.repetition_penalty != 1:
        ids = torch.tensor(request.tokens).unique()
        seen = logits[ids]
        penalty = params.repetition_penalty
        logits[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if request.num_output_tokens and (params.frequency_penalty or params.presence_penalty):
        output = torch.tensor(request.tokens[request.num_prompt_tokens :])
        ids, counts = output.unique(return_counts=True)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
    if params.logit_bias is not None:
        ids, biases = params.logit_bias
        logits[ids] += biases
    if request.num_output_tokens < params.min_tokens:
        logits[list(request.stop_ids)] = -math.inf


def draw(logits: Tensor, params: Params, uniform: float) -> int:
    """Draw an id from adjusted logits [V] by inverting the cumulative sum at uniform in [0, 1).

    Sorted once (equal values by lower id), so that top_k, top_p (Holtzman et al. 2019) and min_p
    (Nguyen et al. 2024) each keep a prefix.
    """
    ordered, ids = logits.sort(descending=True, stable=True)
    if params.top_k:
        ordered = ordered[: params.top_k]
    scaled = (ordered - ordered[0]) / max(params.temperature, SMALLEST)
    probabilities = torch.softmax(scaled, -1)
    if params.top_p < 1:
        before = probabilities.cumsum(0, dtype=torch.float64) - probabilities
        probabilities = prefix(probabilities, before < params.top_p)
    if params.min_p:
        probabilities = prefix(probabilities, probabilities >= params.min_p * probabilities[0])
    # Zeros stand last: the cumulative sum may round up to its end only within the others.
    cumulative = prefix(probabilities, probabilities > 0).cumsum(0, dtype=torch.float64)
    index = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    return int(ids[min(index, len(cumulative) - 1)])


def prefix(values: Tensor, keep: Tensor) -> Tensor:
    """The leading values [n] that keep marks; at least one, also where NaN compares false."""
    return values[: max(1, int(keep.sum()))]


def top(logprobs: Tensor, count: int) -> list[tuple[int, float]] | None:
    """The `count` largest of logprobs [V] as (id, logprob), equal ones by lower id."""
    if not count:
        return None
    values, ids = logprobs.sort(descending=True, stable=True)
    return list(zip(ids[:count].tolist(), values[:count].tolist(), strict=True))

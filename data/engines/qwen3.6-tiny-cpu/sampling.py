"""From logits to tokens, each row by its own request's parameters."""

from collections import Counter

import torch
from torch import Tensor

from .params import LARGEST, SMALLEST, Params
from .request import Request

Sample = tuple[int, float, list[tuple[int, float]] | None]


def sample(logits: Tensor, requests: list[Request]) -> list[Sample]:
    """(token, logprob, top_logprobs) for each row of float32 logits [B, V]."""
    logprobs = logits.log_softmax(-1)
    tokens = logits.argmax(-1).tolist()  # equal logits: the first, that is the lowest id
    for i, request in enumerate(requests):
        if not _is_plain(request):
            tokens[i] = _choose(_adjust(logits[i], request), request)
    own = logprobs[range(len(tokens)), tokens].tolist()
    tops = [_top(row, r.params.logprobs) for row, r in zip(logprobs, requests, strict=True)]
    return list(zip(tokens, own, tops, strict=True))


def _is_plain(request: Request) -> bool:
    """Whether the token is the largest of the logits as they are."""
    p = request.params
    return p.temperature == 0 and not p.penalises and not p.logit_bias and request.may_stop


def _top(logprobs: Tensor, k: int) -> list[tuple[int, float]] | None:
    """The k largest of a row [V] with their ids; equal values by lower id. None for k = 0."""
    if k == 0:
        return None
    values, ids = logprobs.sort(descending=True, stable=True)
    return list(zip(ids[:k].tolist(), values[:k].tolist(), strict=True))


def _adjust(logits: Tensor, request: Request) -> Tensor:
    """Penalties, bias and min_tokens, on a copy of a row [V]."""
    z, p = logits.clone(), request.params
    if p.penalises:
        _penalise(z, request)
    if p.logit_bias:
        z[list(p.logit_bias)] += torch.tensor(list(p.logit_bias.values()), dtype=z.dtype)
    if not request.may_stop and request.stop_tokens:
        z[list(request.stop_tokens)] = float("-inf")
    return z


def _penalise(z: Tensor, request: Request) -> None:
    """Repetition over prompt and output, then frequency and presence over the output; in place."""
    p = request.params
    seen = list(set(request.tokens))
    found = z[seen]
    factor = p.repetition_penalty
    z[seen] = torch.where(found > 0, found / factor, found * factor)
    counts = Counter(request.tokens[request.prompt_len :])
    if counts:
        often = torch.tensor(list(counts.values()), dtype=z.dtype)
        z[list(counts)] -= p.frequency_penalty * often + p.presence_penalty


def _choose(z: Tensor, request: Request) -> int:
    """A token of the adjusted logits [V]: the largest, or one drawn from what the filters leave."""
    if request.random is None:
        return int(z.argmax())
    chances, ids = _filter(z, request.params)
    total = chances.double().cumsum(0)
    drawn = torch.tensor([request.random.random()], dtype=total.dtype) * total[-1]
    # The first whose sum exceeds the draw is never one of chance zero; those are last.
    place = int(torch.searchsorted(total, drawn, right=True))
    return int(ids[min(place, max(int(chances.count_nonzero()) - 1, 0))])


def _filter(z: Tensor, p: Params) -> tuple[Tensor, Tensor]:
    """Chances, descending, and ids that temperature, top_k, top_p and min_p leave; not summing
    to one. A stable sort gives ties to the lower id."""
    z, ids = z.sort(descending=True, stable=True)
    if p.top_k:
        z, ids = z[: p.top_k], ids[: p.top_k]
    # The maximum first: a tiny temperature must not overflow. float32 holds no smaller divisor.
    chances = ((z - z[0]) / min(max(p.temperature, SMALLEST), LARGEST)).softmax(0)
    if p.top_p < 1:
        before = chances.double().cumsum(0) - chances
        chances = torch.where(before < p.top_p, chances, 0.0)
    if p.min_p > 0:
        chances = torch.where(chances >= p.min_p * chances[0], chances, 0.0)
    return chances, ids

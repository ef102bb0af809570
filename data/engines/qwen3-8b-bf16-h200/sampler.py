"""From logits to tokens where the arg max is not enough: penalties, bias, filters, draws. Plain
torch on every device.

State per slot is dense in the vocabulary and allocated once.
"""

from collections.abc import Callable, Sequence

import torch

from .requests import Request

MAX_TOP = 20


def to_device(
    values: Sequence, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Values of the host as a tensor, without waiting for what the device has still to do."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class Sampler:
    def __init__(
        self,
        slots: int,
        vocab_size: int,
        device: str,
        greedy: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ):
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        self.greedy = greedy
        self.used: set[int] = set()  # slots whose state is not all zero
        self.bias = zeros(slots, vocab_size)
        self.counts = zeros(slots, vocab_size, dtype=torch.int32)  # of output tokens
        self.in_prompt = zeros(slots, vocab_size, dtype=torch.bool)
        self.stops = zeros(slots, vocab_size, dtype=torch.bool)  # hidden before min_tokens

    def start(self, request: Request) -> None:
        """Takes over what a request that enters a slot asks for."""
        slot, device = request.slot, self.bias.device
        if slot in self.used:
            self._clear(slot)
        if not request.needs_sampler():
            return
        self.used.add(slot)
        prompt, output = request.tokens[: request.prompt_len], request.tokens[request.prompt_len :]
        self.in_prompt[slot, to_device(prompt, device)] = True
        if output:
            ids = to_device(output, device)
            self.counts[slot].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        for token, bias in request.params.logit_bias.items():
            self.bias[slot, token] = bias
        if request.stop_ids:
            self.stops[slot, to_device(sorted(request.stop_ids), device)] = True

    def _clear(self, slot: int) -> None:
        for table in (self.bias, self.counts, self.in_prompt, self.stops):
            table[slot].zero_()
        self.used.discard(slot)

    def move(self, source: int, target: int) -> None:
        if not {source, target} & self.used:
            return
        for table in (self.bias, self.counts, self.in_prompt, self.stops):
            table[target] = table[source]
        self.used.add(target)

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> tuple[torch.Tensor, ...]:
        """Tokens [M] and their log-probabilities under the model's own distribution; where a
        request asks for them also the 20 likeliest ids and log-probabilities [M, 20].

        logits [M, V] float32, a row per request.
        """
        slots = to_device([request.slot for request in requests], logits.device)
        own = logits.log_softmax(-1)
        adjusted = self._adjusted(logits, slots, requests)
        tokens, _ = self.greedy(adjusted)
        drawn = [row for row, request in enumerate(requests) if request.params.temperature > 0]
        if drawn:
            rows = to_device(drawn, logits.device)
            tokens[rows] = _draw(adjusted[rows], [requests[row] for row in drawn])
        self.counts[slots, tokens] += 1
        self.used.update(request.slot for request in requests)
        results = (tokens, own.gather(1, tokens[:, None])[:, 0])
        if not any(request.params.logprobs for request in requests):
            return results
        top, ids = own.sort(dim=-1, descending=True, stable=True)
        return *results, ids[:, :MAX_TOP], top[:, :MAX_TOP]

    def _adjusted(self, logits: torch.Tensor, slots: torch.Tensor, requests: Sequence[Request]):
        def column(values: list[float]) -> torch.Tensor:
            return to_device(values, logits.device, logits.dtype)[:, None]

        params = [request.params for request in requests]
        counts = self.counts[slots]
        repetition = column([p.repetition_penalty for p in params])
        seen = self.in_prompt[slots] | (counts > 0)
        penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
        x = torch.where(seen, penalised, logits)
        x = x - column([p.frequency_penalty for p in params]) * counts
        x = x - column([p.presence_penalty for p in params]) * (counts > 0)
        x = x + self.bias[slots]
        early = [[request.num_launched < request.params.min_tokens] for request in requests]
        hidden = self.stops[slots] & to_device(early, logits.device, torch.bool)
        return x.masked_fill(hidden, float("-inf"))


def _draw(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """One token per row by the inverse of the cumulative sum; ties at a cut keep the lower id."""

    def column(values: list[float]) -> torch.Tensor:
        return to_device(values, logits.device, torch.float64)[:, None]

    params = [request.params for request in requests]
    x, ids = logits.sort(dim=-1, descending=True, stable=True)
    x = (x - x[:, :1]) / column(
        [p.temperature for p in params]
    )  # float64: tiny ones do not overflow
    rank = torch.arange(x.shape[1], device=x.device)
    top_k = column([p.top_k or x.shape[1] for p in params])
    p = x.masked_fill(rank >= top_k, float("-inf")).softmax(-1)
    before = p.cumsum(-1) - p
    p = p.masked_fill((before >= column([q.top_p for q in params])) & (rank > 0), 0.0)
    p = p.masked_fill(p < column([q.min_p for q in params]) * p[:, :1], 0.0)
    total = p.cumsum(-1)
    uniform = column([request.generator.random() for request in requests]) * total[:, -1:]
    last = (p > 0).sum(-1, keepdim=True) - 1
    chosen = torch.minimum((total <= uniform).sum(-1, keepdim=True), last.clamp(min=0))
    return ids.gather(1, chosen)[:, 0]

"""Continuous batching with chunked prefill over a fixed number of cache slots."""

from collections import deque
from dataclasses import dataclass

import torch

from .cache import KVCache
from .model import Model, Span
from .params import SamplingParams
from .sampling import Choice, Sampler

PREFILL_BUDGET = 256  # prompt tokens of one step, so that a long prompt delays others briefly

Event = tuple[int, int, float, list[tuple[int, float]] | None, str | None]


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress; `tokens` is the prompt followed by the output."""

    request_id: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    stop_tokens: frozenset[int]
    sampler: Sampler
    slot: int = -1
    num_computed_tokens: int = 0

    @property
    def pending(self) -> int:
        """Tokens that are known but not in the cache: 1 while decoding."""
        return len(self.tokens) - self.num_computed_tokens


class Scheduler:
    """Decides which tokens each step computes, and samples what became ready."""

    def __init__(self, model: Model, cache: KVCache, max_batch: int, max_context: int) -> None:
        self._model = model
        self._cache = cache
        self._max_batch = max_batch
        self._max_context = max_context
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._largest_batch = 0

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def cancel(self, request_id: int) -> None:
        """Drop an unfinished request; ValueError names `request_id` when there is none."""
        for request in self._running:
            if request.request_id == request_id:
                self._release(request)
                return
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return
        raise ValueError(f"request_id {request_id} is unknown or already finished")

    def step(self) -> list[Event]:
        """Admit, compute one batch, sample; events in order of admission."""
        self._admit()
        plan = self._plan()
        if not plan:
            return []
        self._largest_batch = max(self._largest_batch, len(plan))
        return [self._advance(request, choice) for request, choice in self._compute(plan)]

    def stats(self) -> dict[str, int]:
        """Counters as the engine's contract names them."""
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "cache_bytes_total": self._cache.bytes_total,
            "cache_bytes_used": self._cache.bytes_used,
            "largest_batch": self._largest_batch,
            "prefix_hit_tokens": 0,
            "preemptions": 0,
            "graph_replays": 0,
        }

    def _admit(self) -> None:
        """Start waiting requests, first come first served, while there is room."""
        while self._waiting and len(self._running) < self._max_batch and self._cache.can_allocate():
            request = self._waiting.popleft()
            request.slot = self._cache.allocate()
            self._running.append(request)

    def _plan(self) -> list[tuple[Request, int]]:
        """Requests of this step and how many tokens each feeds; decoding ones always go."""
        budget, plan = PREFILL_BUDGET, []
        for request in self._running:
            count = request.pending
            if count > 1:
                count = min(count, budget)
                budget -= count
            if count:
                plan.append((request, count))
        return plan

    def _compute(self, plan: list[tuple[Request, int]]) -> list[tuple[Request, Choice]]:
        """Run the model on the plan and sample for requests with nothing left pending."""
        tokens, spans, ready, last_rows = [], [], [], []
        for request, count in plan:
            start = request.num_computed_tokens
            tokens += request.tokens[start : start + count]
            spans.append(Span(request.slot, start, count))
            if count == request.pending:
                ready.append(request)
                last_rows.append(len(tokens) - 1)
        hidden = self._model.forward(torch.tensor(tokens), spans, self._cache)
        for request, count in plan:
            request.num_computed_tokens += count
        if not ready:
            return []
        logits = self._model.logits(hidden[last_rows])
        return [(r, r.sampler.choose(row)) for r, row in zip(ready, logits, strict=True)]

    def _advance(self, request: Request, choice: Choice) -> Event:
        """Append a sampled token and finish the request where it ends."""
        request.tokens.append(choice.token)
        reason = self._finish_reason(request)
        if reason:
            self._release(request)
        return (request.request_id, *choice, reason)

    def _finish_reason(self, request: Request) -> str | None:
        """Why the request ends with its newest token, or None; stop wins over length."""
        produced = len(request.tokens) - request.prompt_len
        if request.tokens[-1] in request.stop_tokens and produced >= request.params.min_tokens:
            return "stop"
        full = len(request.tokens) >= self._max_context
        return "length" if full or produced >= request.params.max_new_tokens else None

    def _release(self, request: Request) -> None:
        """Take a running request out and free its slot."""
        self._running.remove(request)
        self._cache.free(request.slot)

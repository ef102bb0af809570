"""Continuous batching with chunked prefill over the slots of the cache.

A step admits waiting requests first come, first served, feeds one token of every decoding request
and the next chunks of unfinished prompts as one batch (Yu et al. 2022; Agrawal et al. 2023), and
samples for each request whose last token was fed.
"""

from collections import deque
from itertools import accumulate

import numpy as np
import torch

from .batch import PREFILL_TOKENS, Chunk, make_batch
from .cache import KVCache
from .model import Qwen3
from .params import SamplingParams
from .sampling import Sampler, top_logprobs

Result = tuple[int, int, float, list[tuple[int, float]] | None, str | None]


class Request:
    """State of one request; the token sampled last is not in the cache until it is fed."""

    def __init__(
        self, request_id: int, tokens: list[int], params: SamplingParams, sampler: Sampler
    ) -> None:
        self.request_id = request_id
        self.tokens = tokens  # prompt and output
        self.num_prompt_tokens = len(tokens)
        self.num_computed_tokens = 0
        self.slot = -1  # none while it waits
        self.params = params
        self.sampler = sampler

    @property
    def num_output_tokens(self) -> int:
        """Tokens produced so far."""
        return len(self.tokens) - self.num_prompt_tokens


class Scheduler:
    """Queues of waiting and running requests over one model and one cache."""

    def __init__(self, model: Qwen3, cache: KVCache, max_context: int) -> None:
        self._model = model
        self._cache = cache
        self._max_context = max_context
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in order of admission
        self._next_id = 0
        self._largest_batch = 0

    def add(self, tokens: list[int], params: SamplingParams) -> int:
        """Queue a request, whose `tokens` the scheduler keeps and extends; returns its id."""
        sampler = Sampler(params, tokens, self._model.config.end_tokens)
        request = Request(self._next_id, tokens, params, sampler)
        self._waiting.append(request)
        self._next_id += 1
        return request.request_id

    def cancel(self, request_id: int) -> None:
        """End a request at once. ValueError names `request_id` if it is in no queue."""
        for queue in (self._waiting, self._running):
            for request in queue:
                if request.request_id == request_id:
                    queue.remove(request)
                    if request.slot >= 0:
                        self._cache.free(request.slot)
                    return
        raise ValueError("request_id is unknown or finished")

    def step(self) -> list[Result]:
        """Advance every running request that the token budget reaches; tokens that came of it."""
        self._admit()
        scheduled = self._schedule()
        if not scheduled:
            return []
        self._largest_batch = max(self._largest_batch, len(scheduled))
        chunks = [chunk for _, chunk in scheduled]
        hidden = self._model.forward(make_batch(chunks, self._model.queries_per_kv), self._cache)
        for request, chunk in scheduled:
            request.num_computed_tokens = chunk.end
        last_rows = [end - 1 for end in accumulate(len(chunk.tokens) for chunk in chunks)]
        requests = [request for request, _ in scheduled]
        return self._sample(requests, hidden[last_rows])

    def stats(self) -> dict[str, int]:
        """Counters of requests, bytes and features; 0 for features that do not exist here."""
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
        while self._waiting and self._cache.can_allocate():
            request = self._waiting.popleft()
            request.slot = self._cache.allocate()
            self._running.append(request)

    def _schedule(self) -> list[tuple[Request, Chunk]]:
        """This step's chunks in order of slots; older prompts take the prefill budget first."""
        budget = PREFILL_TOKENS
        scheduled = []
        for request in self._running:
            start, end = request.num_computed_tokens, len(request.tokens)
            if request.num_output_tokens == 0:
                end = min(end, start + budget)
                budget -= end - start
            if end > start:
                scheduled.append((request, Chunk(request.slot, start, request.tokens[start:end])))
        return sorted(scheduled, key=lambda pair: pair[0].slot)

    def _sample(self, requests: list[Request], hidden: torch.Tensor) -> list[Result]:
        """Sample where all tokens are computed; hidden [n, E] are the last rows of n requests."""
        ready = [i for i, r in enumerate(requests) if r.num_computed_tokens == len(r.tokens)]
        if not ready:
            return []
        logits = self._model.logits(hidden[ready])
        logprobs = torch.log_softmax(logits, -1).numpy()
        rows = zip(ready, logits.numpy(), logprobs, strict=True)
        return [self._advance(requests[i], row, logprob) for i, row, logprob in rows]

    def _advance(self, request: Request, logits: np.ndarray, logprobs: np.ndarray) -> Result:
        """Append one token, sampled from logits [V], to a request and end it where due."""
        token, is_stop = request.sampler.sample(logits, request.num_output_tokens)
        request.tokens.append(token)
        reason = "stop" if is_stop else "length" if self._is_full(request) else None
        if reason:
            self._running.remove(request)
            self._cache.free(request.slot)
        tops = top_logprobs(logprobs, request.params.logprobs)
        return request.request_id, token, float(logprobs[token]), tops, reason

    def _is_full(self, request: Request) -> bool:
        return (
            request.num_output_tokens == request.params.max_new_tokens
            or len(request.tokens) == self._max_context
        )

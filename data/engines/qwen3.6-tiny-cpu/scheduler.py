"""Continuous batching: which requests run, and which of their tokens a step feeds."""

from collections import deque

from .batch import Chunk
from .cache import Cache
from .request import Request

PREFILL_BUDGET = 128  # prompt tokens of one step, so that long prompts do not hold up decoding


class Scheduler:
    """Queues of waiting and running requests; a running one owns a cache slot."""

    def __init__(self, cache: Cache) -> None:
        """No request yet; as many can run as `cache` has slots."""
        self._cache = cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def schedule(self) -> list[tuple[Request, Chunk]]:
        """Admit what fits, first come first served, and choose the tokens of this step.

        One token of each decoding request; prompts share the budget in order of admission.
        """
        while self.waiting and self._cache.can_allocate():
            request = self.waiting.popleft()
            request.slot = self._cache.allocate()
            self.running.append(request)
        chosen, budget = [], PREFILL_BUDGET
        for request in self.running:
            count = 1
            if request.num_pending > 1 or request.num_produced == 0:
                count = min(request.num_pending, budget)
                budget -= count
            if count:
                chosen.append((request, self._chunk(request, count)))
        return chosen

    def _chunk(self, request: Request, count: int) -> Chunk:
        """The next `count` tokens of a request."""
        start = request.num_computed_tokens
        return Chunk(request.slot, start, request.tokens[start : start + count])

    def finish(self, request: Request) -> None:
        """End a running request and free its slot."""
        self.running.remove(request)
        self._cache.free(request.slot)

    def cancel(self, request_id: int) -> None:
        """End a waiting or running request; ValueError names `request_id` if there is none."""
        for request in self.running:
            if request.id == request_id:
                return self.finish(request)
        for request in self.waiting:
            if request.id == request_id:
                return self.waiting.remove(request)
        raise ValueError(f"request_id {request_id!r:.60} is unknown or already finished")

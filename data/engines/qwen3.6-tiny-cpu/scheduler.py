"""Which requests run, and which of their tokens a step feeds."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from .batch import Chunk
from .cache import Cache
from .sampling import Sampler

PREFILL_TOKENS = 256  # prompt tokens of one step, so that decoding neighbours wait a little only


@dataclass
class Request:
    """One request; tokens are its prompt and its output, logprobs how many it asked for."""

    request_id: int
    tokens: list[int]
    sampler: Sampler
    logprobs: int
    num_computed_tokens: int = 0
    slot: int = -1

    @property
    def remaining(self) -> int:
        """Tokens that are not in the cache; one while decoding."""
        return len(self.tokens) - self.num_computed_tokens

    def advance(self, count: int) -> Chunk:
        """The next count tokens, from now on taken as computed."""
        start = self.num_computed_tokens
        self.num_computed_tokens += count
        return Chunk(self.slot, start, self.tokens[start : start + count])


class Scheduler:
    """Waiting and running requests, first come first served, over the slots of a cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def schedule(self) -> list[tuple[Request, Chunk]]:
        """Admit what has room and choose each request's tokens of this step, shortest first.

        The order puts chunks of equal length side by side.
        """
        while self.waiting and self._cache.can_allocate():
            request = self.waiting.popleft()
            request.slot = self._cache.allocate()
            self.running.append(request)
        counts = sorted(self._counts(), key=lambda pair: pair[1])
        return [(request, request.advance(count)) for request, count in counts]

    def _counts(self) -> Iterator[tuple[Request, int]]:
        """One token of each decoding request, then prompts within the budget, oldest first."""
        budget = PREFILL_TOKENS
        for request in self.running:
            if request.remaining == 1:
                yield request, 1
            elif budget:
                count = min(budget, request.remaining)
                budget -= count
                yield request, count

    def finish(self, request: Request) -> None:
        """Take a running request out and free its slot."""
        self.running.remove(request)
        self._cache.free(request.slot)

    def cancel(self, request_id: int) -> None:
        """End a waiting or running request; ValueError when there is none of this id."""
        for request in chain(self.waiting, self.running):
            if request.request_id == request_id:
                break
        else:
            raise ValueError(f"request_id {request_id!r} is unknown or finished")
        if request.slot < 0:
            self.waiting.remove(request)
        else:
            self.finish(request)

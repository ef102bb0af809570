"""Requests, and which of their tokens each step computes."""

from dataclasses import dataclass, field
from random import Random

from .cache import KVCache
from .params import Params

# Prompt tokens per step: enough to fill matrix products, few enough that decoding requests that
# share the step do not wait long.
PREFILL_BUDGET = 128


@dataclass(slots=True)
class Request:
    """One request: its tokens so far, and how many of them are in the cache."""

    id: int
    tokens: list[int]  # prompt, then output
    params: Params
    stop_ids: frozenset[int]
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    slot: int = -1
    random: Random = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self.random = Random(self.params.seed)

    @property
    def num_output_tokens(self) -> int:
        """Tokens produced so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that are not in the cache: 1 while decoding."""
        return len(self.tokens) - self.num_computed_tokens

    def finish_reason(self, max_context: int) -> str | None:
        """Why the request ends with its newest token; None while it goes on."""
        produced = self.num_output_tokens
        if self.tokens[-1] in self.stop_ids and produced >= self.params.min_tokens:
            return "stop"
        full = len(self.tokens) == max_context
        return "length" if full or produced == self.params.max_new_tokens else None


class Scheduler:
    """Waiting and running requests by id, first come, first served; each running one has a slot."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, Request] = {}

    def schedule(self) -> list[tuple[Request, int]]:
        """Admit what fits, then choose this step's requests and how many tokens each feeds.

        Those that feed one token come first, by slot, as the model wants them.
        """
        self._admit()
        budget = PREFILL_BUDGET
        chosen = []
        for request in self.running.values():
            pending = request.num_pending_tokens
            count = pending if pending == 1 else min(pending, budget)
            if count:
                chosen.append((request, count))
            budget -= count if pending > 1 else 0
        return sorted(chosen, key=lambda item: (item[1] > 1, item[0].slot))

    def remove(self, request_id: int) -> None:
        """Forget a request and free its slot; ValueError naming request_id if there is none."""
        if request_id in self.running:
            self._cache.free(self.running.pop(request_id).slot)
        elif request_id in self.waiting:
            del self.waiting[request_id]
        else:
            raise ValueError(f"request_id {request_id!r} is unknown or finished")

    def _admit(self) -> None:
        """Start waiting requests in order of submission while slots are free."""
        while self.waiting and self._cache.can_allocate():
            request = self.waiting.pop(next(iter(self.waiting)))
            request.slot = self._cache.allocate()
            self.running[request.id] = request

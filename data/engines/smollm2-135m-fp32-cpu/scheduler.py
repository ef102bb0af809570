"""Requests and the choice of what each step computes: continuous batching, chunked prefill."""

from dataclasses import dataclass

from .attention import Chunk
from .cache import KVCache
from .params import SamplingParams
from .sampling import Sampler

# Prompt tokens of one step: enough rows to make a product efficient, few enough that the
# requests that decode in the same step do not wait long.
PREFILL_TOKENS = 128


class Request:
    """One request: tokens is the prompt and, appended to it, the output."""

    def __init__(
        self, request_id: int, prompt: list[int], params: SamplingParams, end_ids: tuple[int, ...]
    ) -> None:
        self.id = request_id
        self.tokens = list(prompt)
        self.params = params
        self.num_computed_tokens = 0
        self._prompt_len = len(prompt)
        self._stop_ids = set(params.stop_token_ids) | set(() if params.ignore_eos else end_ids)
        self.sampler = Sampler(params, prompt, self._stop_ids)

    def finish_reason(self, max_context: int) -> str | None:
        """Why the request ends after its newest token; None while it goes on."""
        num_output = len(self.tokens) - self._prompt_len
        if self.tokens[-1] in self._stop_ids and num_output > self.params.min_tokens:
            return "stop"
        if num_output == self.params.max_new_tokens or len(self.tokens) == max_context:
            return "length"
        return None


@dataclass(frozen=True, slots=True)
class Work:
    """A request's share of one step."""

    request: Request
    chunk: Chunk

    @property
    def completes(self) -> bool:
        """Whether the chunk ends with the request's newest token, so that one is sampled."""
        return self.chunk.start + len(self.chunk.tokens) == len(self.request.tokens)


class Scheduler:
    """First come, first served; a running request keeps its slot until it ends."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._waiting: dict[int, Request] = {}
        self._running: dict[int, Request] = {}
        self._slots: dict[int, int] = {}
        self.largest_batch = 0

    @property
    def num_waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting[request.id] = request

    def schedule(self) -> list[Work]:
        """Admit what fits, then give every decode one token and prefills the token budget."""
        self._admit()
        budget, batch = PREFILL_TOKENS, []
        for request in self._running.values():
            start = request.num_computed_tokens
            count = len(request.tokens) - start
            if count > 1:
                count = min(count, budget)
                budget -= count
            if count:
                tokens = request.tokens[start : start + count]
                batch.append(Work(request, Chunk(self._slots[request.id], start, tokens)))
        self.largest_batch = max(self.largest_batch, len(batch))
        return batch

    def remove(self, request_id: int) -> None:
        """Forget a waiting or running request; KeyError when there is none of that id."""
        if request_id in self._waiting:
            del self._waiting[request_id]
            return
        del self._running[request_id]
        self._cache.free(self._slots.pop(request_id))

    def _admit(self) -> None:
        while self._waiting and self._cache.can_allocate():
            request = self._waiting.pop(next(iter(self._waiting)))
            self._running[request.id] = request
            self._slots[request.id] = self._cache.allocate()

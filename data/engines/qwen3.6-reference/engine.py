"""Requests, the scheduler's step, and the engine's interface."""

from collections import deque
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import weights
from .cache import Cache, NoCache, Place, block_bytes, blocks_for, slot_bytes
from .config import Config
from .model import Model, Sequence
from .params import Params
from .sampler import Sampler

DTYPE = torch.float32
STEP_TOKENS = 64  # most tokens that one step computes
Result = tuple[int, int, float, list[tuple[int, float]] | None, str | None]


@dataclass
class Request:
    """tokens: prompt and output; the first num_computed_tokens of them are in the cache."""

    id: int
    tokens: list[int]
    params: Params
    sampler: Sampler
    last_length: int  # of tokens, when max_new_tokens or the context is reached
    num_computed_tokens: int = 0
    place: Place | None = None


def load(
    checkpoint: str | Path,
    *,
    device: str,
    max_batch: int,
    max_context: int,
    cache_bytes: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> "Engine":
    """Read a checkpoint and allocate the cache; ValueError names what cannot be."""
    if (rank, world) != (0, 1):
        raise ValueError(f"world: {world}; this engine runs on one device")
    for name, value in (("max_batch", max_batch), ("max_context", max_context)):
        if not _is_integer(value) or value < 1:
            raise ValueError(f"{name}: {value!r} is not a positive integer")
    folder = Path(checkpoint)
    config = Config.read(folder)
    if max_context > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise ValueError(f"max_context: {max_context} is beyond max_position_embeddings {limit}")
    place = _device(device)
    n_blocks = _cache_blocks(config, max_batch, max_context, cache_bytes)
    tensors = weights.read(folder, config, place, DTYPE)
    model = Model(config, tensors, max_context)
    cache = Cache(config, n_blocks, max_batch, place, DTYPE)
    return Engine(model, cache, NoCache(config, place, DTYPE), max_batch, max_context)


class Engine:
    """Continuous batching over one model; every call is made between steps."""

    def __init__(
        self, model: Model, cache: Cache, no_cache: NoCache, max_batch: int, max_context: int
    ):
        self.model = model
        self.config = model.config
        self.cache = cache
        self.no_cache = no_cache
        self.max_batch = max_batch
        self.max_context = max_context
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.next_id = 0
        self.largest_batch = 0
        self.steps = 0
        self.experts_touched = 0.0  # distinct ones of a layer, summed over the steps

    @torch.inference_mode()
    def score(
        self, tokens: list[int], positions: list[int], *, routing: bool = False
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """float32 logits [len(positions), vocab] after reading tokens[0 .. position].

        routing: the chosen experts too, int64 [layers, len(tokens), k], the likeliest first.
        """
        self._check_tokens(tokens, self.max_context)
        if not positions:
            raise ValueError("positions: empty")
        for position in positions:
            if not _is_integer(position) or not 0 <= position < len(tokens):
                raise ValueError(f"positions: {position!r} is not an index of {len(tokens)} tokens")
        nowhere = Place([], 0)
        output = self.model.forward([Sequence(list(tokens), 0, nowhere)], self.no_cache)
        logits = self.model.logits(output.hidden[positions]).cpu().numpy()
        return (logits, output.experts.cpu().numpy()) if routing else logits

    def submit(self, tokens: list[int], params: dict[str, Any]) -> int:
        """Queue a request; its id."""
        self._check_tokens(tokens, self.max_context - 1)
        parsed = Params.parse(params, self.config.vocab_size)
        eos = frozenset() if parsed.ignore_eos else self.config.eos_token_ids
        sampler = Sampler(parsed, list(tokens), eos | frozenset(parsed.stop_token_ids))
        last_length = min(len(tokens) + parsed.max_new_tokens, self.max_context)
        request = Request(self.next_id, list(tokens), parsed, sampler, last_length)
        self.next_id += 1
        self.waiting.append(request)
        return request.id

    @torch.inference_mode()
    def step(self) -> list[Result]:
        """Compute one batch of tokens; what became ready."""
        self._admit()
        work = self._schedule()
        if not work:
            return []
        self.largest_batch = max(self.largest_batch, len(work))
        output = self.model.forward([sequence for _, sequence in work], self.cache)
        self._count_experts(output.experts)
        ends = np.cumsum([len(sequence.tokens) for _, sequence in work]) - 1
        ready = []
        for (request, sequence), end in zip(work, ends, strict=True):
            request.num_computed_tokens += len(sequence.tokens)
            if request.num_computed_tokens == len(request.tokens):
                ready.append((request, int(end)))
        if not ready:
            return []
        logits = self.model.logits(output.hidden[[end for _, end in ready]])
        return [
            self._advance(request, row) for (request, _), row in zip(ready, logits, strict=True)
        ]

    def cancel(self, request_id: int) -> None:
        """Give up a waiting or running request."""
        for request in self.waiting:
            if request.id == request_id:
                self.waiting.remove(request)
                return
        for request in self.running:
            if request.id == request_id:
                self._retire(request)
                return
        raise ValueError(f"request_id: {request_id!r} is neither waiting nor running")

    def stats(self) -> dict[str, Any]:
        """Counters of now, and since load."""
        block, slot = block_bytes(self.config, DTYPE), slot_bytes(self.config, DTYPE)
        blocks, slots = self.cache.n_blocks, self.cache.n_slots
        used_blocks = blocks - len(self.cache.free_blocks)
        used_slots = slots - len(self.cache.free_slots)
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "cache_bytes_total": blocks * block + slots * slot,
            "cache_bytes_used": used_blocks * block + used_slots * slot,
            "largest_batch": self.largest_batch,
            "experts_touched": self.experts_touched / self.steps if self.steps else 0.0,
            "prefix_hit_tokens": 0,
            "preemptions": 0,
            "graph_replays": 0,
        }

    def close(self) -> None:
        """Let go of requests, weights and cache."""
        self.waiting.clear()
        self.running.clear()
        self.model.weights.clear()
        self.cache.layers.clear()

    def _admit(self) -> None:
        # Blocks for the whole answer are reserved at once, so that no request is ever preempted.
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting[0]
            if not self.cache.can_allocate(request.last_length):
                return
            request.place = self.cache.allocate(request.last_length)
            self.running.append(self.waiting.popleft())

    def _schedule(self) -> list[tuple[Request, Sequence]]:
        """Tokens of this step: every decoding request's one, then as much prefill as fits."""
        room, work = STEP_TOKENS, []
        for request in sorted(self.running, key=_is_prefill):  # in order of admission otherwise
            start = request.num_computed_tokens
            size = max(room, 0) if _is_prefill(request) else 1
            if tokens := request.tokens[start : start + size]:
                work.append((request, Sequence(tokens, start, request.place)))
                room -= len(tokens)
        return work

    def _advance(self, request: Request, logits: torch.Tensor) -> Result:
        token, logprob, top = request.sampler.sample(logits.cpu())
        request.tokens.append(token)
        finish = None
        if token in request.sampler.end_tokens:
            finish = "stop"
        elif len(request.tokens) == request.last_length:
            finish = "length"
        if finish:
            self._retire(request)
        return request.id, token, logprob, top, finish

    def _retire(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.free(request.place)

    def _count_experts(self, chosen: torch.Tensor) -> None:
        self.steps += 1
        self.experts_touched += sum(len(layer.unique()) for layer in chosen) / len(chosen)

    def _check_tokens(self, tokens: list[int], limit: int) -> None:
        if not tokens:
            raise ValueError("tokens: empty")
        if len(tokens) > limit:
            raise ValueError(f"tokens: {len(tokens)} of them, and the context has room for {limit}")
        for token in tokens:
            if not _is_integer(token) or not 0 <= token < self.config.vocab_size:
                raise ValueError(f"tokens: {token!r} is no id below {self.config.vocab_size}")


def _is_prefill(request: Request) -> bool:
    return len(request.tokens) - request.num_computed_tokens > 1


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device: {name!r} is none that torch knows") from error


def _cache_blocks(config: Config, max_batch: int, max_context: int, limit: int | None) -> int:
    """Blocks for max_batch requests of max_context, or as many as `limit` bytes hold besides a
    slot of state for each request."""
    wanted, size = max_batch * blocks_for(max_context), block_bytes(config, DTYPE)
    if limit is None:
        return wanted
    room = limit - max_batch * slot_bytes(config, DTYPE)
    if room < blocks_for(max_context) * size:
        raise ValueError(
            f"cache_bytes: {limit} do not hold the state of {max_batch} requests "
            f"and one of {max_context} tokens"
        )
    return min(wanted, room // size) if size else wanted

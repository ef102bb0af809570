"""Requests, the scheduler's step, and the engine's interface."""

import secrets
from collections import deque
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import weights
from .cache import BlockCache, NoCache, block_bytes, blocks_for
from .config import Config
from .model import Model, Sequence
from .parallel import Group
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
    block_table: list[int] = field(default_factory=list)


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
    if not (_is_integer(rank) and _is_integer(world) and 0 <= rank < world):
        raise ValueError(f"rank: {rank!r} is not one of world {world!r}")
    for name, value in (("max_batch", max_batch), ("max_context", max_context)):
        if not _is_integer(value) or value < 1:
            raise ValueError(f"{name}: {value!r} is not a positive integer")
    folder = Path(checkpoint)
    config = Config.read(folder)
    if max_context > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise ValueError(f"max_context: {max_context} is beyond max_position_embeddings {limit}")
    place = _device(device)
    group = Group.join(rank, world, config, place)
    own = group.own(config)
    n_blocks = _cache_blocks(own, max_batch, max_context, cache_bytes)
    model = Model(own, weights.read(folder, config, place, DTYPE, group), max_context, group)
    return Engine(model, BlockCache(own, n_blocks, place, DTYPE), max_batch, max_context)


class Engine:
    """Continuous batching over one model; every call is made between steps."""

    def __init__(self, model: Model, cache: BlockCache, max_batch: int, max_context: int):
        self.model = model
        self.config = model.config
        self.cache = cache
        self.max_batch = max_batch
        self.max_context = max_context
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.next_id = 0
        self.largest_batch = 0

    @torch.inference_mode()
    def score(
        self, tokens: list[int], positions: list[int], *, routing: bool = False
    ) -> np.ndarray:
        """float32 logits [len(positions), vocab] after reading tokens[0 .. position]."""
        if routing:
            raise ValueError("routing: this model has no experts")
        self._check_tokens(tokens, self.max_context)
        if not positions:
            raise ValueError("positions: empty")
        for position in positions:
            if not _is_integer(position) or not 0 <= position < len(tokens):
                raise ValueError(f"positions: {position!r} is not an index of {len(tokens)} tokens")
        hidden = self.model.forward([Sequence(list(tokens), 0, [])], NoCache())
        return self.model.logits(hidden[positions]).cpu().numpy()

    def submit(self, tokens: list[int], params: dict[str, Any]) -> int:
        """Queue a request; its id."""
        self._check_tokens(tokens, self.max_context - 1)
        parsed = Params.parse(params, self.config.vocab_size)
        eos = frozenset() if parsed.ignore_eos else self.config.eos_token_ids
        if parsed.seed is None:  # the same on every rank, another one each time
            parsed = replace(parsed, seed=self.model.group.agree(secrets.randbits(62)))
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
        hidden = self.model.forward([sequence for _, sequence in work], self.cache)
        ends = np.cumsum([len(sequence.tokens) for _, sequence in work]) - 1
        ready = []
        for (request, sequence), end in zip(work, ends, strict=True):
            request.num_computed_tokens += len(sequence.tokens)
            if request.num_computed_tokens == len(request.tokens):
                ready.append((request, int(end)))
        if not ready:
            return []
        logits = self.model.logits(hidden[[end for _, end in ready]])
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
        size = block_bytes(self.config, DTYPE)
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "cache_bytes_total": self.cache.n_blocks * size,
            "cache_bytes_used": (self.cache.n_blocks - len(self.cache.free_blocks)) * size,
            "largest_batch": self.largest_batch,
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
            request.block_table = self.cache.allocate(request.last_length)
            self.running.append(self.waiting.popleft())

    def _schedule(self) -> list[tuple[Request, Sequence]]:
        """Tokens of this step: every decoding request's one, then as much prefill as fits."""
        room, work = STEP_TOKENS, []
        for request in sorted(self.running, key=_is_prefill):  # in order of admission otherwise
            start = request.num_computed_tokens
            size = max(room, 0) if _is_prefill(request) else 1
            if tokens := request.tokens[start : start + size]:
                work.append((request, Sequence(tokens, start, request.block_table)))
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
        self.cache.free(request.block_table)

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
    """Blocks for max_batch requests of max_context, or as many as `limit` bytes hold."""
    wanted = max_batch * blocks_for(max_context)
    if limit is None:
        return wanted
    affordable = limit // block_bytes(config, DTYPE)
    if affordable < blocks_for(max_context):
        raise ValueError(f"cache_bytes: {limit} do not hold one request of {max_context} tokens")
    return min(wanted, affordable)

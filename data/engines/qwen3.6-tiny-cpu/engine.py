"""The engine's interface: load, score, submit, step, cancel, stats, close."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .batch import Chunk, build_batch
from .cache import Cache, fitting_slots
from .config import Config, read_config
from .model import Model
from .params import parse_ids, parse_integer, parse_params
from .sampling import Sampler, likeliest
from .scheduler import PREFILL_TOKENS, Request, Scheduler
from .weights import load_weights

Result = tuple[int, int, float, list[tuple[int, float]] | None, str | None]


class Engine:
    """One model on a CPU, serving requests by continuous batching."""

    def __init__(self, config: Config, model: Model, cache: Cache, max_context: int) -> None:
        self._config = config
        self._model = model
        self._cache = cache
        self._scheduler = Scheduler(cache)
        self._max_context = max_context
        self._next_id = 0
        self._largest_batch = 0
        self._steps = 0
        self._touched = 0

    @torch.inference_mode()
    def score(
        self, tokens: Sequence[int], positions: Sequence[int], *, routing: bool = False
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Logits [len(positions), V] after tokens[0..p] for each p of positions, float32.

        With routing also the expert ids [layers, len(tokens), k], int64. ValueError names tokens
        or positions. Running requests are not disturbed: the sequence has a cache of its own.
        """
        ids = self._parse_tokens(tokens, self._max_context)
        if not isinstance(positions, Iterable):
            raise ValueError("positions must be a list of indices")
        rows = [parse_integer("positions", each, 0, len(ids) - 1) for each in positions]
        if not rows:
            raise ValueError("positions is empty")
        cache = Cache(self._config, 1, len(ids))
        slot, parts = cache.allocate(), []
        for start in range(0, len(ids), PREFILL_TOKENS):
            chunk = Chunk(slot, start, ids[start : start + PREFILL_TOKENS])
            parts.append(self._model.forward(build_batch([chunk]), cache))
        hidden = torch.cat([part for part, _ in parts])
        logits = self._model.logits(hidden[rows]).numpy()
        return (logits, torch.cat([part for _, part in parts], 1).numpy()) if routing else logits

    def submit(self, tokens: Sequence[int], params: Mapping[str, Any]) -> int:
        """Queue a request and return its id; ValueError names tokens or the parameter at fault."""
        prompt = self._parse_tokens(tokens, self._max_context - 1)
        parsed = parse_params(params, self._config.vocab_size)
        sampler = Sampler(parsed, prompt, self._config.vocab_size, self._config.eos_token_ids)
        request = Request(self._next_id, prompt, sampler, parsed.logprobs)
        self._next_id += 1
        self._scheduler.add(request)
        return request.request_id

    @torch.inference_mode()
    def step(self) -> list[Result]:
        """Advance the work by one batch -> (request id, token, logprob, top, finish reason) each."""
        work = self._scheduler.schedule()
        if not work:
            return []
        batch = build_batch([chunk for _, chunk in work])
        hidden, experts = self._model.forward(batch, self._cache)
        self._count(len(work), experts)
        ready = [i for i, (request, _) in enumerate(work) if request.remaining == 0]
        if not ready:
            return []
        logits = self._model.logits(hidden[batch.last_rows[ready]])
        rows = zip(logits, logits.log_softmax(-1), strict=True)
        return [self._report(work[i][0], *row) for i, row in zip(ready, rows, strict=True)]

    def cancel(self, request_id: int) -> None:
        """End a request at once; ValueError names request_id when it is unknown or finished."""
        self._scheduler.cancel(request_id)

    def stats(self) -> dict[str, int | float]:
        """Counts of now and since load; bytes for the cache."""
        visits = self._steps * self._config.num_hidden_layers
        return {
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "cache_bytes_total": self._cache.bytes_total,
            "cache_bytes_used": self._cache.bytes_used,
            "largest_batch": self._largest_batch,
            "prefix_hit_tokens": 0,
            "preemptions": 0,
            "graph_replays": 0,
            "experts_touched": self._touched / visits if visits else 0.0,
        }

    def close(self) -> None:
        """Drop requests, cache and weights; the engine is of no use afterwards."""
        self.__dict__.clear()

    def _parse_tokens(self, tokens: Any, most: int) -> list[int]:
        ids = parse_ids("tokens", tokens, self._config.vocab_size)
        if not 0 < len(ids) <= most:
            raise ValueError(f"tokens must hold 1 to {most} ids, not {len(ids)}")
        return ids

    def _count(self, requests: int, experts: torch.Tensor) -> None:
        """Take a step's batch and expert ids [layers, T, k] into the statistics."""
        self._largest_batch = max(self._largest_batch, requests)
        self._steps += 1
        used = torch.zeros(len(experts), self._config.num_experts, dtype=torch.bool)
        self._touched += int(used.scatter_(1, experts.flatten(1), True).sum())

    def _report(self, request: Request, logits: torch.Tensor, logprobs: torch.Tensor) -> Result:
        """Sample a request's next token from its logits [V]; end the request where it is due."""
        token, reason = request.sampler.sample(logits)
        request.tokens.append(token)
        if reason is None and len(request.tokens) == self._max_context:
            reason = "length"
        if reason is not None:
            self._scheduler.finish(request)
        top = likeliest(logprobs, request.logprobs)
        return request.request_id, token, float(logprobs[token]), top, reason


@torch.inference_mode()
def load(
    checkpoint: str | Path,
    *,
    device: str,
    max_batch: int,
    max_context: int,
    cache_bytes: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> Engine:
    """An engine over a checkpoint's folder, its cache allocated.

    cache_bytes bounds the cache. ValueError names the argument, config field, tensor or file.
    """
    if device != "cpu":
        raise ValueError(f"device {device!r} cannot be used, only 'cpu'")
    parse_integer("world", world, 1, 1)
    parse_integer("rank", rank, 0, 0)
    config = read_config(Path(checkpoint))
    parse_integer("max_batch", max_batch, 1, float("inf"))
    parse_integer("max_context", max_context, 1, config.max_position_embeddings)
    if cache_bytes is not None:
        parse_integer("cache_bytes", cache_bytes, 1, float("inf"))
    slots = fitting_slots(config, max_batch, max_context, cache_bytes)
    model = Model(config, load_weights(Path(checkpoint), config))
    return Engine(config, model, Cache(config, slots, max_context), max_context)

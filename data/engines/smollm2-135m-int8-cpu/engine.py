"""The engine's public face: load, score, submit, step, cancel, stats, close."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .cache import KVCache, slot_bytes
from .config import ModelConfig, is_int, read_config
from .model import Model, Span
from .params import check_tokens, parse_params
from .sampling import Sampler
from .scheduler import Event, Request, Scheduler
from .weights import open_weights

SCORE_CHUNK = 256  # rows at once, which bounds the memory of activations and masks


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
) -> "Engine":
    """Load a checkpoint folder; ValueError names what cannot be used."""
    if str(device) != "cpu":
        raise ValueError(f"device must be 'cpu', not {device!r}")
    if not is_int(world) or world != 1:
        raise ValueError("world must be 1: this engine runs in one process")
    if not is_int(rank) or rank != 0:
        raise ValueError("rank must be 0 in a world of 1")
    for name, value in (("max_batch", max_batch), ("max_context", max_context)):
        if not is_int(value) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
    folder = Path(checkpoint)
    config = read_config(folder)
    if max_context > config.max_positions:
        raise ValueError(f"max_context exceeds the model's {config.max_positions} positions")
    slots = _count_slots(config, max_batch, max_context, cache_bytes)
    with open_weights(folder, config) as weights:
        model = Model(config, weights, max_context)
    cache = KVCache(config, slots, max_context)
    return Engine(config, model, Scheduler(model, cache, max_batch, max_context), max_context)


def _count_slots(
    config: ModelConfig, max_batch: int, max_context: int, cache_bytes: int | None
) -> int:
    """Cache slots: one per request of max_batch, or as many as cache_bytes allow."""
    if cache_bytes is None:
        return max_batch
    if not is_int(cache_bytes) or cache_bytes < slot_bytes(config, max_context):
        raise ValueError(f"cache_bytes is too small for one request of {max_context} tokens")
    return min(max_batch, cache_bytes // slot_bytes(config, max_context))


def _check_positions(positions: list[int], count: int) -> list[int]:
    """A checked copy of indices into `count` tokens; ValueError names `positions`."""
    rows = list(positions) if isinstance(positions, Iterable) else []
    if not rows or not all(is_int(row) and 0 <= row < count for row in rows):
        raise ValueError(f"positions must be one or more integers in [0, {count})")
    return [int(row) for row in rows]


class Engine:
    """One loaded model with its requests."""

    def __init__(
        self, config: ModelConfig, model: Model, scheduler: Scheduler, max_context: int
    ) -> None:
        self._config = config
        self._model = model
        self._scheduler = scheduler
        self._max_context = max_context
        self._next_id = 0

    @torch.inference_mode()
    def score(
        self, tokens: list[int], positions: list[int], *, routing: bool = False
    ) -> np.ndarray:
        """Logits float32 [len(positions), V]; row i follows tokens[0..positions[i]].

        Uses a cache of its own, so that running requests are not touched.
        """
        if routing:
            raise ValueError("routing is for models with experts")
        ids = check_tokens(tokens, self._config.vocab_size)
        if len(ids) > self._max_context:
            raise ValueError(f"tokens are more than max_context, {self._max_context}")
        rows = _check_positions(positions, len(ids))
        scratch = KVCache(self._config, 1, len(ids))
        chunks = []
        for start in range(0, len(ids), SCORE_CHUNK):
            chunk = torch.tensor(ids[start : start + SCORE_CHUNK])
            chunks.append(self._model.forward(chunk, [Span(0, start, len(chunk))], scratch))
        return self._model.logits(torch.cat(chunks)[rows]).numpy()

    def submit(self, tokens: list[int], params: dict[str, Any]) -> int:
        """Queue a request and return its id; ValueError names what is wrong."""
        ids = check_tokens(tokens, self._config.vocab_size)
        if len(ids) >= self._max_context:
            raise ValueError("tokens leave no room for a new token in max_context")
        parsed = parse_params(params, self._config.vocab_size)
        ends = frozenset() if parsed.ignore_eos else self._config.end_tokens
        stops = ends | frozenset(parsed.stop_token_ids)
        banned = sorted(token for token in stops if 0 <= token < self._config.vocab_size)
        request_id = self._next_id
        self._next_id += 1
        sampler = Sampler(parsed, ids, banned)
        self._scheduler.add(Request(request_id, ids, len(ids), parsed, stops, sampler))
        return request_id

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Advance by one scheduler step; (id, token, logprob, top_logprobs, finish_reason)."""
        return self._scheduler.step()

    def cancel(self, request_id: int) -> None:
        """End a waiting or running request; ValueError names `request_id` if there is none."""
        if not is_int(request_id):
            raise ValueError(f"request_id must be an integer, not {request_id!r}")
        self._scheduler.cancel(request_id)

    def stats(self) -> dict[str, int]:
        """Counters of the present state."""
        return self._scheduler.stats()

    def close(self) -> None:
        """Drop the model, the cache and all requests; the engine is of no use afterwards."""
        self.__dict__.clear()

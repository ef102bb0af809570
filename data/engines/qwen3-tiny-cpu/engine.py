"""The engine's public interface."""

from pathlib import Path

import numpy as np
import torch

from .batch import PREFILL_TOKENS, Chunk, make_batch
from .cache import KVCache, slot_bytes
from .checks import integer, integers
from .config import ModelConfig, read_config
from .model import Qwen3
from .params import parse_params
from .scheduler import Result, Scheduler
from .weights import load_weights


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
    """Load a Qwen3 checkpoint folder for up to max_batch requests of max_context tokens.

    `cache_bytes` bounds the key/value cache in bytes; None is what max_batch requests need.
    ValueError names the argument, file, field or tensor at fault.
    """
    if device != "cpu":
        raise ValueError("device must be cpu")
    integer("world", world, 1, 1)
    integer("rank", rank, 0, 0)
    config = read_config(Path(checkpoint))
    max_context = integer("max_context", max_context, 1, config.max_position_embeddings)
    max_batch = integer("max_batch", max_batch, 1)
    num_slots = _num_slots(config, max_batch, max_context, cache_bytes)
    with torch.inference_mode():
        model = Qwen3(config, load_weights(Path(checkpoint), config), max_context)
        return Engine(model, KVCache(config, num_slots, max_context), max_context)


def _num_slots(
    config: ModelConfig, max_batch: int, max_context: int, cache_bytes: int | None
) -> int:
    """How many requests the cache can hold at once."""
    if cache_bytes is None:
        return max_batch
    one = slot_bytes(config, max_context)
    return min(max_batch, integer("cache_bytes", cache_bytes, one) // one)


class Engine:
    """A loaded model that scores texts and serves requests; made by `load`."""

    def __init__(self, model: Qwen3, cache: KVCache, max_context: int) -> None:
        self._model = model
        self._max_context = max_context
        self._scheduler = Scheduler(model, cache, max_context)

    @torch.inference_mode()
    def score(
        self, tokens: list[int], positions: list[int], *, routing: bool = False
    ) -> np.ndarray:
        """Logits [len(positions), V] float32; row i is the prediction after tokens[positions[i]].

        Runs over a cache of its own, so running requests are not disturbed. ValueError names
        `tokens`, `positions` or, as a dense model routes nothing, `routing`.
        """
        if routing is not False:
            raise ValueError("routing is for models with experts")
        ids = self._token_ids(tokens, self._max_context)
        rows = integers("positions", positions, len(ids))
        if not rows:
            raise ValueError("positions must not be empty")
        return self._model.logits(self._hidden(ids[: max(rows) + 1])[rows]).numpy()

    def submit(self, tokens: list[int], params: dict) -> int:
        """Queue a prompt and return its request id. ValueError names `tokens` or the parameter."""
        ids = self._token_ids(tokens, self._max_context - 1)
        return self._scheduler.add(ids, parse_params(params, self._model.config.vocab_size))

    @torch.inference_mode()
    def step(self) -> list[Result]:
        """One scheduler step: (request id, token, logprob, top_logprobs, finish_reason) each."""
        return self._scheduler.step()

    def cancel(self, request_id: int) -> None:
        """End a waiting or running request at once. ValueError names `request_id`."""
        self._scheduler.cancel(integer("request_id", request_id, 0))

    def stats(self) -> dict[str, int]:
        """Requests now, bytes of the cache, and counters since `load`."""
        return self._scheduler.stats()

    def close(self) -> None:
        """Drop weights, cache and requests; the engine is of no use afterwards."""
        self.__dict__.clear()

    def _token_ids(self, tokens: object, longest: int) -> list[int]:
        """A checked copy of a text of 1 to `longest` tokens."""
        ids = integers("tokens", tokens, self._model.config.vocab_size)
        if not 1 <= len(ids) <= longest:
            raise ValueError(f"tokens must be 1 to {longest} in number")
        return ids

    def _hidden(self, ids: list[int]) -> torch.Tensor:
        """Last-layer states [len(ids), E], in chunks like a prefill."""
        cache = KVCache(self._model.config, 1, len(ids))
        slot = cache.allocate()
        chunks = [
            Chunk(slot, start, ids[start : start + PREFILL_TOKENS])
            for start in range(0, len(ids), PREFILL_TOKENS)
        ]
        batches = (make_batch([chunk], self._model.queries_per_kv) for chunk in chunks)
        return torch.cat([self._model.forward(batch, cache) for batch in batches])

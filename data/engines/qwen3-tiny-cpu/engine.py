"""The engine: load, score, submit, step, cancel, stats, close."""

from pathlib import Path

import numpy as np
import torch

from .cache import KVCache, slot_bytes
from .checks import check_ids, is_int
from .config import Config, read_config
from .model import Model, Segment
from .params import read_params
from .sampling import Sample, sample
from .scheduler import PREFILL_BUDGET, Request, Scheduler
from .weights import load_weights

Result = tuple[int, int, float, list[tuple[int, float]] | None, str | None]


class Engine:
    """One model with its cache and queues; made by `load`."""

    def __init__(self, config: Config, model: Model, cache: KVCache, max_context: int) -> None:
        self._config = config
        self._model = model
        self._cache = cache
        self._scheduler = Scheduler(cache)
        self._max_context = max_context
        self._next_id = 0
        self._largest_batch = 0
        self._closed = False

    @torch.inference_mode()
    def score(
        self, tokens: list[int], positions: list[int], *, routing: bool = False
    ) -> np.ndarray:
        """Logits float32 [len(positions), V] after reading tokens[0..p] for each p of positions.

        Works in a cache of its own for the time of the call. ValueError names the argument at
        fault; `routing` is for models with experts.
        """
        self._check_open()
        if routing:
            raise ValueError("routing needs a model with experts; this one is dense")
        tokens = self._check_tokens(tokens, self._max_context)
        positions = check_ids("positions", positions, len(tokens))
        if not positions:
            raise ValueError("positions is empty")
        wanted = sorted(set(positions))
        logits = self._score_sorted(tokens[: wanted[-1] + 1], wanted)
        return logits[np.searchsorted(wanted, positions)]

    def _score_sorted(self, tokens: list[int], wanted: list[int]) -> np.ndarray:
        """Logits [len(wanted), V] at ascending positions, computed chunk by chunk."""
        cache = KVCache(self._config, num_slots=1, max_context=len(tokens))
        parts = []
        for start in range(0, len(tokens), PREFILL_BUDGET):
            segment = Segment(0, start, tokens[start : start + PREFILL_BUDGET])
            rows = [p - start for p in wanted if start <= p < start + PREFILL_BUDGET]
            parts.append(self._model.forward([segment], cache, rows).numpy())
        return np.concatenate(parts)

    def submit(self, tokens: list[int], params: dict) -> int:
        """Queue a prompt; returns its request id. ValueError names what is at fault."""
        self._check_open()
        tokens = self._check_tokens(tokens, self._max_context - 1)
        checked = read_params(params, self._config.vocab_size)
        end_ids = frozenset() if checked.ignore_eos else self._config.eos_token_ids
        stop_ids = end_ids | frozenset(checked.stop_token_ids)
        in_vocabulary = frozenset(i for i in stop_ids if i < self._config.vocab_size)
        request = Request(self._next_id, tokens, checked, in_vocabulary)
        self._next_id += 1
        self._scheduler.waiting[request.id] = request
        return request.id

    @torch.inference_mode()
    def step(self) -> list[Result]:
        """Advance every running request by one chunk or token.

        Returns (request id, token, logprob, top_logprobs, finish_reason) of each new token.
        """
        self._check_open()
        scheduled = self._scheduler.schedule()
        if not scheduled:
            return []
        self._largest_batch = max(self._largest_batch, len(scheduled))
        ready, rows, segments, end = [], [], [], 0
        for request, count in scheduled:
            start = request.num_computed_tokens
            segments.append(Segment(request.slot, start, request.tokens[start : start + count]))
            end += count
            if count == request.num_pending_tokens:
                ready.append(request)
                rows.append(end - 1)
        logits = self._model.forward(segments, self._cache, rows)
        for request, count in scheduled:
            request.num_computed_tokens += count
        samples = sample(logits, ready)
        return [self._take(request, new) for request, new in zip(ready, samples, strict=True)]

    def _take(self, request: Request, new: Sample) -> Result:
        """Add a sampled token to its request; forget the request if that ends it."""
        request.tokens.append(new.token)
        reason = request.finish_reason(self._max_context)
        if reason is not None:
            self._scheduler.remove(request.id)
        return (request.id, *new, reason)

    def cancel(self, request_id: int) -> None:
        """End a waiting or running request at once; ValueError naming request_id if unknown."""
        self._check_open()
        if not is_int(request_id):
            raise ValueError(f"request_id must be an integer, not {request_id!r}")
        self._scheduler.remove(request_id)

    def stats(self) -> dict[str, int]:
        """Counts of requests and bytes of cache now, and the largest batch so far."""
        self._check_open()
        return {
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "cache_bytes_total": self._cache.bytes_total,
            "cache_bytes_used": self._cache.bytes_used,
            "largest_batch": self._largest_batch,
            "prefix_hit_tokens": 0,
            "preemptions": 0,
            "graph_replays": 0,
        }

    def close(self) -> None:
        """End all requests and release the weights and the cache; closing twice is harmless."""
        if self._closed:
            return
        for request_id in (*self._scheduler.running, *self._scheduler.waiting):
            self._scheduler.remove(request_id)
        self._closed = True
        del self._model, self._cache, self._scheduler

    def _check_open(self) -> None:
        """ValueError after close."""
        if self._closed:
            raise ValueError("the engine is closed")

    def _check_tokens(self, tokens: list[int], most: int) -> list[int]:
        """Copy a sequence of 1 to `most` ids; ValueError naming tokens."""
        tokens = check_ids("tokens", tokens, self._config.vocab_size)
        if not 1 <= len(tokens) <= most:
            raise ValueError(f"tokens: {len(tokens)} of them, where 1 to {most} fit")
        return tokens


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
    """Load a checkpoint folder and allocate the cache.

    max_batch: most requests that run at once; max_context: most tokens of one request; cache_bytes:
    upper bound of the cache's size in bytes. ValueError names the argument, field, file or tensor
    at fault.
    """
    if str(device) != "cpu":
        raise ValueError(f"device {device!r} is not supported, only 'cpu'")
    if world != 1 or isinstance(world, bool):
        raise ValueError(f"world {world!r}: this engine runs in one process")
    if rank != 0 or isinstance(rank, bool):
        raise ValueError(f"rank {rank!r}: this engine runs in one process")
    for name, value in (("max_batch", max_batch), ("max_context", max_context)):
        if not is_int(value) or value < 1:
            raise ValueError(f"{name} must be a positive integer, not {value!r}")
    folder = Path(checkpoint)
    config = read_config(folder)
    if max_context > config.max_position_embeddings:
        raise ValueError(f"max_context {max_context} is beyond the model's positions")
    slots = count_slots(slot_bytes(config, max_context), max_batch, cache_bytes)
    model = Model(config, load_weights(folder, config), max_context)
    return Engine(config, model, KVCache(config, slots, max_context), max_context)


def count_slots(bytes_each: int, max_batch: int, cache_bytes: int | None) -> int:
    """How many requests can run at once; ValueError naming cache_bytes if not even one."""
    if cache_bytes is None:
        return max_batch
    if not is_int(cache_bytes) or cache_bytes < bytes_each:
        raise ValueError(f"cache_bytes {cache_bytes!r} does not hold one request of {bytes_each}")
    return min(max_batch, cache_bytes // bytes_each)

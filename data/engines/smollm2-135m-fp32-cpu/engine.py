"""The engine's public face: load, score, submit, step, cancel, stats, close."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .attention import Chunk
from .cache import KVCache, slot_bytes
from .checkpoint import Checkpoint
from .checks import filled_id_list, integer
from .config import ModelConfig, read_config
from .model import Model
from .params import parse_params
from .sampling import top_logprobs
from .scheduler import PREFILL_TOKENS, Request, Scheduler, Work
from .weights import load_weights

# (request id, token, logprob, top_logprobs, finish_reason)
Event = tuple[int, int, float, list[tuple[int, float]] | None, str | None]


class Engine:
    """Serves requests with one model; not safe for use by several threads at once."""

    def __init__(self, config: ModelConfig, model: Model, cache: KVCache, max_context: int) -> None:
        self._config = config
        self._model = model
        self._cache = cache
        self._max_context = max_context
        self._scheduler = Scheduler(cache)
        self._next_id = 0

    @torch.inference_mode()
    def score(
        self, tokens: list[int], positions: list[int], *, routing: bool = False
    ) -> np.ndarray:
        """Return logits [len(positions), V] in float32: row i predicts tokens[positions[i] + 1].

        Computed in chunks over a scratch cache of its own, so that requests are not touched.
        ValueError naming tokens, positions or routing.
        """
        if routing is not False:
            raise ValueError("routing is not supported: the model is dense")
        ids = filled_id_list("tokens", tokens, self._config.vocab_size)
        if len(ids) > self._max_context:
            raise ValueError(f"tokens: {len(ids)} are more than max_context {self._max_context}")
        wanted = filled_id_list("positions", positions, len(ids))
        ids = ids[: max(wanted) + 1]
        scratch = KVCache(self._config, 1, len(ids))
        logits = torch.empty(len(wanted), self._config.vocab_size)
        for start in range(0, len(ids), PREFILL_TOKENS):
            chunk = Chunk(0, start, ids[start : start + PREFILL_TOKENS])
            end = start + len(chunk.tokens)
            here = [i for i, position in enumerate(wanted) if start <= position < end]
            rows = [wanted[i] - start for i in here]
            logits[here] = self._model.forward(scratch, [chunk], rows)
        return logits.numpy()

    def submit(self, tokens: list[int], params: dict[str, Any]) -> int:
        """Queue a request and return its id; ValueError naming tokens or the parameter."""
        prompt = filled_id_list("tokens", tokens, self._config.vocab_size)
        if len(prompt) >= self._max_context:
            raise ValueError(
                f"tokens: {len(prompt)} leave no room in max_context {self._max_context}"
            )
        checked = parse_params(params, self._config.vocab_size)
        request_id = self._next_id
        self._next_id += 1
        self._scheduler.add(Request(request_id, prompt, checked, self._config.end_ids))
        return request_id

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Advance every running request by one token or one prefill chunk; return new tokens."""
        batch = self._scheduler.schedule()
        if not batch:
            return []
        logits = self._compute(batch)
        ready = [work.request for work in batch if work.completes]
        for work in batch:
            work.request.num_computed_tokens += len(work.chunk.tokens)
        logprobs = torch.log_softmax(logits, dim=-1)
        return [self._emit(*row) for row in zip(ready, logits, logprobs, strict=True)]

    def cancel(self, request_id: int) -> None:
        """End a waiting or running request; ValueError naming request_id when there is none."""
        known = integer("request_id", request_id, 0)
        try:
            self._scheduler.remove(known)
        except KeyError:
            raise ValueError(f"request_id {known} is unknown or finished") from None

    def stats(self) -> dict[str, int]:
        """Counters of the moment, and largest_batch since load."""
        return {
            "running": self._scheduler.num_running,
            "waiting": self._scheduler.num_waiting,
            "cache_bytes_total": self._cache.bytes_total,
            "cache_bytes_used": self._cache.bytes_used,
            "largest_batch": self._scheduler.largest_batch,
            "prefix_hit_tokens": 0,
            "preemptions": 0,
            "graph_replays": 0,
        }

    def close(self) -> None:
        """Drop the weights, the cache and all requests; the engine cannot be used any more."""
        self.__dict__.clear()

    def _compute(self, batch: list[Work]) -> Tensor:
        """Run one pass; return logits [R, V] of the requests that get a token."""
        rows, end = [], 0
        for work in batch:
            end += len(work.chunk.tokens)
            if work.completes:
                rows.append(end - 1)
        return self._model.forward(self._cache, [work.chunk for work in batch], rows)

    def _emit(self, request: Request, logits: Tensor, logprobs: Tensor) -> Event:
        """Choose a request's token from logits [V], append it and end the request if due."""
        token = request.sampler.choose(logits)
        request.tokens.append(token)
        reason = request.finish_reason(self._max_context)
        if reason is not None:
            self._scheduler.remove(request.id)
        count = request.params.logprobs
        best = top_logprobs(logprobs, count) if count else None
        return request.id, token, float(logprobs[token]), best, reason


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
    """Load a checkpoint folder and allocate the KV cache.

    cache_bytes bounds the cache; fewer requests than max_batch run at once when it is smaller
    than what they need. ValueError naming the argument, field, tensor or file that is wrong.
    """
    if device != "cpu":
        raise ValueError(f"device must be 'cpu', not {device!r}")
    integer("world", world, 1, 1)
    integer("rank", rank, 0, 0)
    max_batch = integer("max_batch", max_batch, 1)
    folder = Path(checkpoint)
    config = read_config(folder)
    max_context = integer("max_context", max_context, 1, config.max_position_embeddings)
    num_slots = _num_slots(config, max_batch, max_context, cache_bytes)
    weights = load_weights(Checkpoint(folder, config), config)
    cache = KVCache(config, num_slots, max_context)
    return Engine(config, Model(config, weights, max_context), cache, max_context)


def _num_slots(
    config: ModelConfig, max_batch: int, max_context: int, cache_bytes: int | None
) -> int:
    if cache_bytes is None:
        return max_batch
    size = slot_bytes(config, max_context)
    return min(max_batch, integer("cache_bytes", cache_bytes, size) // size)

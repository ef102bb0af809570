"""The interface: load, score, submit, step, cancel, stats, close."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .batch import Batch, Chunk
from .cache import Cache, slot_bytes
from .checks import boolean, integer, integers
from .config import Config, read_config
from .model import Model, read_model
from .params import read_params
from .request import Request
from .sampling import sample
from .scheduler import Scheduler

SCORE_CHUNK = 256  # tokens of one pass of `score`: bounds its working memory

Result = tuple[int, int, float, list[tuple[int, float]] | None, str | None]


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
    """Read a checkpoint's folder and allocate the cache.

    At most `max_batch` requests run at once, of at most `max_context` tokens each, prompt and
    output together; `cache_bytes` bounds the cache. ValueError names what is at fault.
    """
    if device != "cpu":
        raise ValueError(f"device {device!r} cannot be used, only 'cpu'")
    integer("world", world, 1, 1)
    integer("rank", rank, 0, 0)
    integer("max_batch", max_batch, 1)
    folder = Path(checkpoint)
    config = read_config(folder)
    integer("max_context", max_context, 1, config.max_position_embeddings)
    slots = _slots(config, max_batch, max_context, cache_bytes)
    return Engine(read_model(folder, config, max_context), slots, max_context)


def _slots(config: Config, max_batch: int, max_context: int, cache_bytes: int | None) -> int:
    """How many requests fit into the bound."""
    if cache_bytes is None:
        return max_batch
    each = slot_bytes(config, max_context)
    if integer("cache_bytes", cache_bytes, 0) < each:
        raise ValueError(f"cache_bytes {cache_bytes} is too small: one request takes {each}")
    return min(max_batch, cache_bytes // each)


class Engine:
    """A loaded model with its cache and its requests."""

    def __init__(self, model: Model, slots: int, max_context: int) -> None:
        """`slots` requests of `max_context` tokens can run at once."""
        self._model = model
        self._max_context = max_context
        self._cache = Cache(model.config, slots, max_context)
        self._scheduler = Scheduler(self._cache)
        vocab = range(model.config.vocab_size)
        self._end_tokens = frozenset(t for t in model.config.end_tokens if t in vocab)
        self._next_id = 0
        self._steps = 0
        self._largest_batch = 0
        self._experts_touched = 0.0  # sum over the steps of the mean over the layers

    @torch.inference_mode()
    def score(
        self, tokens: Sequence[int], positions: Sequence[int], *, routing: bool = False
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Logits after tokens[0..position] for each of `positions`, float32 [positions, V].

        With `routing` also the experts used, int64 [layers, tokens, k]. Leaves no trace.
        """
        read = self._tokens(tokens, self._max_context)
        wanted = integers("positions", positions, len(read))
        if not wanted:
            raise ValueError("positions is empty")
        boolean("routing", routing)
        logits, chosen = self._score(read, wanted)
        return (logits.numpy(), chosen.numpy()) if routing else logits.numpy()

    def _score(self, tokens: list[int], positions: list[int]) -> tuple[Tensor, Tensor]:
        """Logits [positions, V] and experts [layers, tokens, k], with a cache of its own."""
        cache = Cache(self._model.config, 1, len(tokens))
        logits = torch.empty(len(positions), self._model.config.vocab_size)
        chosen = []
        for start in range(0, len(tokens), SCORE_CHUNK):
            chunk = Chunk(0, start, tokens[start : start + SCORE_CHUNK])
            end = start + len(chunk.tokens)
            here = [i for i, position in enumerate(positions) if start <= position < end]
            rows = [positions[i] - start for i in here]
            logits[here], ids = self._model.forward(Batch([chunk], cache), rows)
            chosen.append(torch.stack(ids))
        return logits, torch.cat(chosen, dim=1)

    def _tokens(self, tokens: Sequence[int], most: int) -> list[int]:
        """A checked copy of `tokens`, 1 to `most` of them."""
        read = integers("tokens", tokens, self._model.config.vocab_size)
        if not 1 <= len(read) <= most:
            raise ValueError(f"tokens must be 1 to {most} ids, not {len(read)}")
        return read

    def submit(self, tokens: Sequence[int], params: dict) -> int:
        """Queue a request; returns its id. ValueError names the argument or parameter at fault."""
        prompt = self._tokens(tokens, self._max_context - 1)
        checked = read_params(params, self._model.config.vocab_size)
        request = Request(self._next_id, prompt, checked, self._end_tokens)
        self._next_id += 1
        self._scheduler.add(request)
        return request.id

    @torch.inference_mode()
    def step(self) -> list[Result]:
        """Advance the work by one step: (request id, token, logprob, top_logprobs, finish_reason)
        of every request that has a new token."""
        scheduled = self._scheduler.schedule()
        if not scheduled:
            return []
        batch = Batch([chunk for _, chunk in scheduled], self._cache)
        ready, rows = [], []
        for request, chunk in scheduled:
            request.num_computed_tokens += len(chunk.tokens)
            if request.num_pending == 0:
                ready.append(request)
                rows.append(batch.row(chunk, -1))
        logits, chosen = self._model.forward(batch, rows)
        self._count(len(scheduled), chosen)
        return self._report(logits, ready) if ready else []

    def _count(self, requests: int, chosen: list[Tensor]) -> None:
        """Add a step to the statistics; `chosen` are the experts [tokens, k] of each layer."""
        used = torch.zeros(len(chosen), self._model.config.num_experts)
        used.scatter_(1, torch.stack(chosen).flatten(1), 1.0)
        self._steps += 1
        self._experts_touched += used.sum().item() / len(chosen)
        self._largest_batch = max(self._largest_batch, requests)

    def _report(self, logits: Tensor, ready: list[Request]) -> list[Result]:
        """Sample a token for each row of logits [B, V] and end what is complete."""
        results = []
        for request, drawn in zip(ready, sample(logits, ready), strict=True):
            reason = request.append(drawn[0], self._max_context)
            if reason:
                self._scheduler.finish(request)
            results.append((request.id, *drawn, reason))
        return results

    def cancel(self, request_id: int) -> None:
        """End a request at once; ValueError names `request_id` if it is not waiting or running."""
        self._scheduler.cancel(integer("request_id", request_id, 0))

    def stats(self) -> dict[str, int | float]:
        """Counts of now and since load."""
        return {
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "cache_bytes_total": self._cache.bytes_total,
            "cache_bytes_used": self._cache.bytes_used,
            "largest_batch": self._largest_batch,
            "prefix_hit_tokens": 0,
            "preemptions": 0,
            "graph_replays": 0,
            "experts_touched": self._experts_touched / max(self._steps, 1),
        }

    def close(self) -> None:
        """Release weights, cache and requests; the engine is of no use afterwards."""
        del self._model, self._cache, self._scheduler

"""Continuous batching: requests wait, are prefilled in chunks, decode together, and end.

The next step is launched before the tokens of the last one are read, so a request that stops on a
token has computed one more, which is dropped.
"""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from . import sampler
from .cache import Cache
from .config import Config
from .params import Params, read_params, whole

PREFILL_CHUNK = 1024


@dataclass
class Request:
    """One sequence: what was asked and how far it is."""

    id: int
    prompt: list[int]
    params: Params
    stops: tuple[int, ...]
    slot: int = -1
    num_computed_tokens: int = 0
    launched: int = 0  # tokens picked on the device, read or not
    returned: int = 0
    finished: bool = False
    history: sampler.History | None = None


@dataclass
class Launch:
    """A pick whose tokens have not been read yet."""

    requests: list[Request]
    picked: object
    tops: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class Engine:
    """The interface of this folder; see engine.json for what it serves."""

    def __init__(self, config: Config, cache: Cache, runner, max_context: int) -> None:
        self.config, self.cache, self.runner = config, cache, runner
        self.max_context = max_context
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.prefilling: Request | None = None
        self.launches: deque[Launch] = deque()
        self.next_id, self.largest_batch = 0, 0

    @torch.inference_mode()
    def score(self, tokens, positions, *, routing: bool = False):
        """Float32 logits [len(positions), V] of a text, and expert ids [layers, T, k] if asked."""
        tokens, positions = self._check_tokens("tokens", tokens), _integers("positions", positions)
        if not positions:
            raise ValueError("positions: empty; give at least one")
        if any(not 0 <= p < len(tokens) for p in positions):
            raise ValueError(f"positions: each must be in 0..{len(tokens) - 1}")
        if not self.cache.can_allocate(len(tokens)):
            raise ValueError("tokens: no free slot or pages; score needs room beside the requests")
        slot = self.cache.allocate(len(tokens))
        try:
            logits, ids = self._score(slot, tokens, positions, routing)
        finally:
            self.cache.deallocate(slot)
        return (logits, ids) if routing else logits

    def _score(self, slot: int, tokens: list[int], positions: list[int], routing: bool):
        wanted, ids = np.empty((len(positions), self.config.vocab), np.float32), []
        for start in range(0, len(tokens), PREFILL_CHUNK):
            chunk = torch.tensor(tokens[start : start + PREFILL_CHUNK], device=self.runner.device)
            layers = [] if routing else None
            hidden = self.runner.forward(chunk, [(slot, start, len(chunk))], layers)
            ids.append(torch.stack(layers).cpu().numpy() if routing else None)
            for row, position in enumerate(positions):
                if start <= position < start + len(chunk):
                    at = position - start
                    wanted[row] = self.runner.head(hidden[at : at + 1])[0].cpu().numpy()
        return wanted, np.concatenate(ids, 1) if routing else None

    def _check_tokens(self, name: str, tokens) -> list[int]:
        tokens = _integers(name, tokens)
        if not tokens:
            raise ValueError(f"{name}: empty; give at least one token")
        if any(not 0 <= t < self.config.vocab for t in tokens):
            raise ValueError(f"{name}: each id must be in 0..{self.config.vocab - 1}")
        if len(tokens) > self.max_context:
            raise ValueError(f"{name}: {len(tokens)} exceed max_context {self.max_context}")
        return tokens

    def submit(self, tokens, params: dict | None = None) -> int:
        """Queue a request; ValueError names the argument that cannot be served.

        An answer that would outgrow max_context ends there, with reason "length".
        """
        prompt = self._check_tokens("tokens", tokens)
        room = self.max_context - len(prompt)
        if room < 1:
            raise ValueError(
                f"tokens: {len(prompt)} leave no room in max_context {self.max_context}"
            )
        read = read_params(params, self.config.vocab)
        read = replace(read, max_new_tokens=min(read.max_new_tokens, room))
        total = len(prompt) + read.max_new_tokens
        if self.cache.pages_for(total) > self.cache.pages_total:
            raise ValueError(f"tokens: {total} positions never fit into the cache (cache_bytes)")
        stops = read.stop_token_ids + (() if read.ignore_eos else self.config.eos_ids)
        self.waiting.append(Request(self.next_id, prompt, read, stops))
        self.next_id += 1
        return self.next_id - 1

    @torch.inference_mode()
    def step(self) -> list[tuple]:
        """Launch one prefill chunk or one decode step; return what became ready before it."""
        self._admit()
        launched = self._prefill(self.prefilling) if self.prefilling else self._decode()
        keep = 1 if launched else 0
        events = []
        while len(self.launches) > keep:
            events += self._collect(self.launches.popleft())
        return events

    def _admit(self) -> None:
        if self.prefilling or not self.waiting:
            return
        request = self.waiting[0]
        total = len(request.prompt) + request.params.max_new_tokens
        if not self.cache.can_allocate(total):
            return
        self.waiting.popleft()
        request.slot = self.cache.allocate(total)
        seed = request.params.seed if request.params.seed is not None else request.id
        self.runner.start(request.slot, request.params.temperature, seed)
        if request.params.counts_tokens:
            prompt = torch.tensor(request.prompt, device=self.runner.device)
            request.history = sampler.History(prompt, self.config.vocab)
        self.prefilling = request

    def _prefill(self, request: Request) -> bool:
        start = request.num_computed_tokens
        chunk = request.prompt[start : start + PREFILL_CHUNK]
        last = start + len(chunk) == len(request.prompt)
        logits = self.runner.prefill(request.slot, start, chunk, last)
        request.num_computed_tokens += len(chunk)
        if not last:
            return True
        self.prefilling = None
        self.running.append(request)
        self._pick([request], logits)
        return True

    def _decode(self) -> bool:
        batch = [r for r in self.running if r.launched < r.params.max_new_tokens]
        if not batch:
            return False
        self.largest_batch = max(self.largest_batch, len(batch))
        logits = self.runner.decode([r.slot for r in batch])
        self._pick(batch, logits)
        return True

    def _pick(self, batch: list[Request], logits: torch.Tensor) -> None:
        filtered = None
        if not all(r.params.plain for r in batch):
            rows = [
                sampler.adjust(logits[i], r.params, r.history, r.stops, r.launched)
                for i, r in enumerate(batch)
            ]
            filtered = torch.stack(rows)
        picked = self.runner.pick([r.slot for r in batch], logits, filtered)
        launch = Launch(list(batch), picked)
        for i, request in enumerate(batch):
            request.launched += 1
            if request.history is not None:
                request.history.add(picked.tokens[i])
            if request.params.logprobs:
                launch.tops[i] = _top(logits[i], request.params.logprobs)
        self.launches.append(launch)

    def _collect(self, launch: Launch) -> list[tuple]:
        events = []
        tokens, logprobs = launch.picked.read()
        for i, request in enumerate(launch.requests):
            if request.finished:
                continue
            request.returned += 1
            reason = _finish_reason(request, tokens[i])
            top = None
            if i in launch.tops:
                ids, values = launch.tops[i]
                top = list(zip(ids.tolist(), values.tolist(), strict=True))
            events.append((request.id, tokens[i], logprobs[i], top, reason))
            if reason:
                self._finish(request)
        return events

    def _finish(self, request: Request) -> None:
        """The slot is free at once: work still in flight for it runs before any new owner's."""
        request.finished = True
        self.running.remove(request)
        self.cache.deallocate(request.slot)

    def cancel(self, request_id: int) -> None:
        """Forget a request; a finished one is forgotten already. ValueError if it never was."""
        if not isinstance(request_id, int) or not 0 <= request_id < self.next_id:
            raise ValueError(f"request_id: {request_id!r} was never given out")
        self.waiting = deque(r for r in self.waiting if r.id != request_id)
        if self.prefilling and self.prefilling.id == request_id:
            self.cache.deallocate(self.prefilling.slot)
            self.prefilling = None
        for request in [r for r in self.running if r.id == request_id]:
            self._finish(request)

    def stats(self) -> dict:
        """Counters; bytes are exact, experts_touched is a mean per layer of expert_steps."""
        return {
            "running": len(self.running) + bool(self.prefilling),
            "waiting": len(self.waiting),
            "cache_bytes_total": self.cache.bytes_total(),
            "cache_bytes_used": self.cache.bytes_used(),
            "largest_batch": self.largest_batch,
            "prefix_hit_tokens": 0,
            "experts_touched": getattr(self.runner, "experts_touched", lambda: None)(),
            "expert_steps": getattr(self.runner, "decode_steps", 0),
            "preemptions": 0,
            "graph_replays": self.runner.graph_replays,
        }

    def close(self) -> None:
        """Release device memory; the engine cannot be used afterwards."""
        self.runner.close()
        self.launches.clear()
        self.runner = self.cache = None


def _integers(name: str, values) -> list[int]:
    """Values as ints; ValueError where one is a fraction or no number at all."""
    try:
        return [whole(value) for value in values]
    except TypeError:
        raise ValueError(f"{name}: each must be an integer") from None


def _finish_reason(request: Request, token: int) -> str | None:
    if token in request.stops and request.returned > request.params.min_tokens:
        return "stop"
    if request.returned == request.params.max_new_tokens:
        return "length"
    return None


def _top(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and log probabilities of the `count` best tokens, equal ones by lowest id."""
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.sort(descending=True, stable=True)
    return ids[:count], values[:count]

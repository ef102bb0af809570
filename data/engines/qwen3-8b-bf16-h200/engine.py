"""The engine: requests in, tokens out. Which request computes what, and when, is decided here."""

import random
from collections import deque
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .config import MAX_BATCH, PAGE, ModelConfig
from .model import KVCache, Model, empty_cache
from .pages import PagePool, page_digests
from .params import SamplingParams, checked_tokens
from .requests import Request
from .runner import CHUNKS, Launch, Runner
from .weights import load_weights

PAUSE = 8192  # prompt tokens after which those who decode have their turn
Result = tuple[int, int, float, list[tuple[int, float]] | None, str | None]


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
    """Opens a Hugging Face folder; ValueError names the argument, tensor or field at fault."""
    folder = Path(checkpoint)
    config = ModelConfig.from_folder(folder)
    _check_arguments(config, device, max_batch, max_context, rank, world)
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        config.check_granules()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    pages = _pages(config, dtype, max_batch, max_context, cache_bytes)
    with torch.inference_mode():
        weights = load_weights(folder, config, device, dtype)
        model = Model(config, weights, empty_cache(config, pages, device, dtype), max_context)
        return Engine(Runner(model, max_batch, max_context), pages, max_batch, max_context)


def _check_arguments(
    config: ModelConfig, device: str, max_batch: int, max_context: int, rank: int, world: int
) -> None:
    if device != "cpu" and not str(device).startswith("cuda"):
        raise ValueError(f"device: {device!r} is not cpu or cuda")
    if str(device).startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device: {device!r}, but torch sees no GPU")
    if rank != 0 or world != 1:
        raise ValueError(f"world: this engine runs on one GPU, not on {world} (rank: {rank})")
    limits = {
        "max_batch": (max_batch, MAX_BATCH),
        "max_context": (max_context, config.max_position_embeddings),
    }
    for name, (value, most) in limits.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or not 1 <= value <= most:
            raise ValueError(f"{name}: {value!r} is not an integer from 1 to {most}")


def _pages(
    config: ModelConfig,
    dtype: torch.dtype,
    max_batch: int,
    max_context: int,
    cache_bytes: int | None,
) -> int:
    """Pages that fit, the scratch page included."""
    per_request = -(-max_context // PAGE)
    page_bytes = KVCache.page_bytes(config, dtype)
    if cache_bytes is None:
        return max_batch * per_request + 1
    if cache_bytes < (per_request + 1) * page_bytes:
        raise ValueError(
            f"cache_bytes: {cache_bytes} is too little for one request of {max_context} tokens, "
            f"which takes {(per_request + 1) * page_bytes} (scratch page included)"
        )
    return min(cache_bytes // page_bytes, max_batch * per_request + 1)


class Engine:
    """Continuous batching over slots and pages.

    `step` starts one decode step for all decoding requests, and prompt chunks, and returns what the
    step before has produced: the device never waits for the host to read a token.
    """

    def __init__(self, runner: Runner, pages: int, max_batch: int, max_context: int):
        self.runner, self.max_context = runner, max_context
        self.config: ModelConfig = runner.model.config
        self.page_bytes = KVCache.page_bytes(self.config, runner.model.weights.norm.dtype)
        self.pool = PagePool(pages)
        self.free_slots = set(range(max_batch))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.in_flight: deque[Launch] = deque()
        self.ready: list[Result] = []  # read, not yet returned
        self.next_id = 0
        self.since_decode = 0  # prompt tokens launched
        self.counts = {"largest_batch": 0, "prefix_hit_tokens": 0, "preemptions": 0}

    # The interface.

    @torch.inference_mode()
    def score(
        self, tokens: Sequence[int], positions: Sequence[int], *, routing: bool = False
    ) -> np.ndarray:
        """float32 logits [len(positions), V] after tokens[0..position]; leaves no trace."""
        if routing:
            raise ValueError("routing: a dense model has no experts to report")
        tokens = checked_tokens(tokens, self.config.vocab_size, self.max_context, "max_context")
        positions = list(positions)
        if not positions or any(not _is_index(p, len(tokens)) for p in positions):
            raise ValueError(
                f"positions: give indices from 0 to {len(tokens) - 1}, not {positions}"
            )
        count = -(-len(tokens) // PAGE)
        self._make_room(count)
        pages = [self.pool.allocate() for _ in range(count)]
        logits = self.runner.score(tokens, pages, [int(p) for p in positions])
        self.pool.release(pages)
        return logits.numpy()

    def submit(self, tokens: Sequence[int], params: dict[str, Any] | None = None) -> int:
        """Queues a request and returns its id."""
        why = "max_context leaves room for one new token"
        tokens = checked_tokens(tokens, self.config.vocab_size, self.max_context - 1, why)
        parsed = SamplingParams.parse(params or {}, self.config.vocab_size)
        ends = () if parsed.ignore_eos else self.config.eos_token_ids
        request = Request(
            id=self.next_id,
            tokens=tokens,
            prompt_len=len(tokens),
            params=parsed,
            stop_ids=frozenset(ends) | frozenset(parsed.stop_token_ids),
            limit=min(parsed.max_new_tokens, self.max_context - len(tokens)),
            generator=random.Random(parsed.seed),
        )
        self.next_id += 1
        self.waiting.append(request)
        return request.id

    @torch.inference_mode()
    def step(self) -> list[Result]:
        """Launches one chunk of a prompt or one decode step, then returns (id, token, logprob,
        top_logprobs, finish_reason) of what was launched before it: no result waits for later work.
        """
        self._admit()
        prompt = next((r for r in self.running if not r.decoding), None)
        decoding = [r for r in self.running if r.decoding and r.num_launched < r.limit]
        if prompt and (not decoding or self.since_decode < PAUSE):
            launched = self._prefill(prompt)
        else:
            launched = self._decode(decoding)
        while len(self.in_flight) > launched:
            self._collect(self.in_flight.popleft())
        while self.in_flight and not self.ready and not self._more_to_come():
            self._collect(self.in_flight.popleft())
        results, self.ready = self.ready, []
        return results

    @torch.inference_mode()
    def cancel(self, request_id: int) -> None:
        """Ends a waiting or running request; ValueError for any other id."""
        for request in [*self.running, *self.waiting]:
            if request.id == request_id:
                self.ready = [result for result in self.ready if result[0] != request_id]
                return self._finish(request)
        raise ValueError(f"request_id: {request_id!r} is unknown or finished")

    def stats(self) -> dict[str, Any]:
        return self.counts | {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "cache_bytes_total": len(self.pool.holders) * self.page_bytes,
            "cache_bytes_used": self.pool.used * self.page_bytes,
            "experts_touched": None,
            "graph_replays": self.runner.graphs.replays,
        }

    def close(self) -> None:
        """Gives the device memory back; the engine cannot be used afterwards."""
        self.in_flight.clear()
        self.running.clear()
        self.waiting.clear()
        del self.runner
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    # Admission and pages.

    def _admit(self) -> None:
        while self.waiting and self.free_slots and self._start(self.waiting[0]):
            self.running.append(self.waiting.popleft())

    def _start(self, request: Request) -> bool:
        """Gives a request a slot and pages for all its tokens, shared ones first; False if there
        are too few.
        """
        digests = page_digests(request.tokens, request.digests)
        shared = self.pool.match(digests[: (len(request.tokens) - 1) // PAGE])
        count = -(-len(request.tokens) // PAGE) - len(shared)
        if not self.pool.can_allocate(count, shared):
            return False
        self.pool.share(shared)
        slot = min(self.free_slots)
        self.free_slots.remove(slot)
        request.digests = digests
        request.start(
            slot, shared + [self.pool.allocate() for _ in range(count)], len(shared) * PAGE
        )
        self.counts["prefix_hit_tokens"] += len(shared) * PAGE
        self.runner.sampler.start(request)
        return True

    def _make_room(self, count: int, keep: Request | None = None) -> None:
        """Until `count` pages are free, the youngest request goes back to the queue, with its
        tokens.
        """
        while not self.pool.can_allocate(count):
            while self.in_flight:  # a request that starts again must know all its tokens
                self._collect(self.in_flight.popleft())
            if self.pool.can_allocate(count):
                return
            victim = next(r for r in reversed(self.running) if r is not keep)
            self._leave(victim)
            victim.stop()
            self.waiting.appendleft(victim)
            self.counts["preemptions"] += 1

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.runner.retire(request.slot)
        self.free_slots.add(request.slot)
        self.pool.release(request.pages)

    def _finish(self, request: Request) -> None:
        request.finished = True
        if request in self.running:
            self._leave(request)
        else:
            self.waiting.remove(request)

    # Launches.

    def _prefill(self, request: Request) -> int:
        """The prompt's next chunk; returns how many launches that left: one after the last."""
        start = request.num_computed
        request.num_computed = min(request.num_prefill, start + CHUNKS[-1])
        chunk = request.tokens[start : request.num_computed]
        results = self.runner.prefill(chunk, start, request.pages)
        self.since_decode += len(chunk)
        self._publish(request)
        if request.decoding:
            self._put(self.runner.first_token(request, results))
        return int(request.decoding)

    def _decode(self, requests: list[Request]) -> int:
        for request in requests:
            if request.slot is not None and request.num_computed == len(request.pages) * PAGE:
                self._make_room(1, keep=request)
                if not request.finished:
                    request.pages.append(self.pool.allocate())
                    self.runner.add_page(request)
        requests = [r for r in requests if r.slot is not None and not r.finished]
        if not requests:
            return 0
        self.since_decode = 0
        for request in requests:
            self.runner.activate(request)
        self._close_gaps(requests)
        requests.sort(key=lambda r: r.slot)
        launch = self.runner.decode(requests)
        for request in requests:
            request.num_computed += 1
        self._put(launch)
        return 1

    def _put(self, launch: Launch) -> None:
        for request in launch.requests:
            request.num_launched += 1
        self.in_flight.append(launch)
        self.counts["largest_batch"] = max(self.counts["largest_batch"], len(launch.requests))

    def _close_gaps(self, requests: list[Request]) -> None:
        """Moves decoding requests from the highest slots into lower free ones."""
        for request in sorted(requests, key=lambda r: -r.slot):
            if self.free_slots and (lowest := min(self.free_slots)) < request.slot:
                self.runner.move(request.slot, lowest)
                self.free_slots.remove(lowest)
                self.free_slots.add(request.slot)
                request.slot = lowest

    # Results.

    def _more_to_come(self) -> bool:
        """Whether the next step has work that does not hang on what is in flight."""
        return any(not r.decoding or r.num_launched < r.limit for r in self.running)

    def _collect(self, launch: Launch) -> None:
        tokens, logprobs, *top = launch.wait()
        for row, request in enumerate(launch.requests):
            if request.finished:
                continue
            request.tokens.append(tokens[row])
            reason = request.finish_reason(tokens[row])
            asked = request.params.logprobs
            pairs = (
                list(zip(*(values[row][:asked] for values in top), strict=True)) if asked else None
            )
            self.ready.append((request.id, tokens[row], logprobs[row], pairs, reason))
            if reason:
                self._publish(request)
                self._finish(request)

    def _publish(self, request: Request) -> None:
        """Lets other prompts find the full pages that this request has computed and whose tokens
        are known.
        """
        full = min(request.num_computed, len(request.tokens)) // PAGE
        request.digests = page_digests(request.tokens, request.digests)
        for page, digest in list(zip(request.pages, request.digests, strict=False))[:full]:
            self.pool.publish(page, digest)


def _is_index(value: Any, length: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= value < length

"""What happens on the device: state of every slot, captured graphs, launches that are read one step
later.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .config import PAGE
from .model import Model
from .requests import Request
from .sampler import Sampler, to_device

BATCHES = (1, 2, 4, 8, 16, 24, 32)
CHUNKS = (64, 128, 256, 384, 512, 640, 768, 896, 1024)  # padded lengths of a prefill chunk
SCORED = 32  # rows of logits at once


@dataclass
class Launch:
    """Tokens on their way to the host: one per request, in order."""

    requests: list[Request]
    rows: list[int]  # of the tensors
    tensors: list[torch.Tensor]  # tokens, log-probabilities; top ids and values if asked
    event: Any = None

    def wait(self) -> list[list]:
        """The tensors' rows in the order of the requests, once they are there."""
        if self.event is not None:
            self.event.synchronize()
        return [
            [values[row] for row in self.rows] for values in map(torch.Tensor.tolist, self.tensors)
        ]


class Graphs:
    """Captured forwards by size; on a device without graphs the function itself."""

    def __init__(self, device: str):
        self.enabled, self.replays = torch.device(device).type == "cuda", 0
        self._calls: dict[Any, tuple[Any, Any]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    def capture(self, key: Any, forward: Callable[[], Any]) -> None:
        """Runs `forward` once, so that kernels exist, then records it; its results keep their
        memory.
        """
        forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            results = forward()
        self._calls[key] = (graph, results)

    def run(self, key: Any, forward: Callable[[], Any]) -> Any:
        if not self.enabled:
            return forward()
        graph, results = self._calls[key]
        graph.replay()
        self.replays += 1
        return results


class Runner:
    """Slots 0..slots-1; a slot that takes no part is at position 0 of the scratch page and stays
    there.
    """

    def __init__(self, model: Model, slots: int, max_context: int):
        self.model, self.device = model, str(model.weights.norm.device)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, device=self.device, dtype=dtype)

        max_pages = -(-max_context // PAGE)
        self.tokens = zeros(slots, dtype=torch.int64)
        self.positions, self.active = zeros(slots), zeros(slots)
        self.block_table = zeros(slots, max_pages)
        self.chunk = zeros(2 + max_pages + CHUNKS[-1])  # start, count, pages, tokens: one copy
        self.start, self.count, table, self.chunk_tokens = self.chunk.split(
            (1, 1, max_pages, CHUNKS[-1])
        )
        self.chunk_table = table[None]
        self.count.fill_(1)
        self.sampler = Sampler(slots, model.config.vocab_size, self.device, model.operators.greedy)
        self.first: dict[int, torch.Tensor] = {}  # first tokens of slots that take part soon
        self.graphs = Graphs(self.device)
        self.batches = [b for b in BATCHES if b < slots] + [slots]
        if self.graphs.enabled:
            self._capture()

    def _capture(self) -> None:
        from .kernels.cuda import compiling

        with compiling():
            for batch in self.batches:
                self._decode(batch)
        for batch in reversed(self.batches):
            self.graphs.capture(batch, lambda batch=batch: self._decode(batch))
        for size in reversed(CHUNKS):
            self.graphs.capture(("prefill", size), lambda size=size: self._prefill(size))

    # One decode step. Runs inside a graph.

    def _decode(self, batch: int) -> tuple[torch.Tensor, ...]:
        tokens, positions = self.tokens[:batch], self.positions[:batch]
        logits = self.model.decode(tokens, positions, self.block_table[:batch])
        chosen, logprobs = self.model.operators.greedy(logits)
        tokens.copy_(chosen)
        positions.add_(self.active[:batch])
        return logits, chosen, logprobs

    def decode(self, requests: Sequence[Request]) -> Launch:
        """One more token for each request, in slot order."""
        top_slot = max(request.slot for request in requests)
        batch = next(b for b in self.batches if b > top_slot)
        logits, chosen, logprobs = self.graphs.run(batch, lambda: self._decode(batch))
        slots = [request.slot for request in requests]
        if not any(request.needs_sampler() for request in requests):
            return self._launch(requests, slots, chosen, logprobs)
        rows = to_device(slots, logits.device)
        results = self.sampler.sample(logits[rows], requests)
        self.tokens[rows] = results[0]
        return self._launch(requests, range(len(requests)), *results)

    # A chunk of one prompt.

    def _prefill(self, size: int) -> tuple[torch.Tensor, ...]:
        heads, residual = self.model.prefill(
            self.chunk_tokens[:size], self.chunk_table, self.start, self.count
        )
        logits = self.model.logits(heads, residual, (self.count - 1).long())
        return heads, residual, logits, *self.model.operators.greedy(logits)

    def prefill(self, tokens: Sequence[int], start: int, pages: Sequence[int]) -> tuple:
        """Runs tokens at positions start.. of the sequence that holds `pages`: `_prefill`'s
        results.
        """
        size = next(size for size in CHUNKS if size >= len(tokens))
        padding = [0] * (self.chunk_table.shape[1] - len(pages))
        self._send(self.chunk, [start, len(tokens), *pages, *padding, *tokens])
        return self.graphs.run(("prefill", size), lambda: self._prefill(size))

    def first_token(self, request: Request, results: tuple) -> Launch:
        """Samples after a prompt's last chunk; the slot takes part from the next step on."""
        _, _, logits, token, logprob = results
        if request.needs_sampler():
            sampled = self.sampler.sample(logits, [request])
        else:
            sampled = (token, logprob)
        self.first[request.slot] = sampled[0].clone()
        return self._launch([request], [0], *sampled)

    def score(
        self, tokens: Sequence[int], pages: Sequence[int], positions: Sequence[int]
    ) -> torch.Tensor:
        """Logits [n, V] on the host after tokens[0..position] for each position."""
        out = torch.empty(len(positions), self.model.config.vocab_size)
        for start in range(0, len(tokens), CHUNKS[-1]):
            chunk = tokens[start : start + CHUNKS[-1]]
            heads, residual = self.prefill(chunk, start, pages)[:2]
            here = [i for i, p in enumerate(positions) if start <= p < start + len(chunk)]
            for at in range(0, len(here), SCORED):
                group = here[at : at + SCORED]
                rows = torch.tensor([positions[i] - start for i in group], device=self.device)
                out[group] = self.model.logits(heads, residual, rows).float().cpu()
        return out

    # Slots.

    def activate(self, request: Request) -> None:
        """Lets the slot of a request take part, if it does not yet."""
        slot = request.slot
        if slot in self.first:
            self.tokens[slot : slot + 1].copy_(self.first.pop(slot))
            self.positions[slot] = request.num_computed
            self._send(self.block_table[slot], request.pages)
            self.active[slot] = 1

    def add_page(self, request: Request) -> None:
        self.block_table[request.slot, len(request.pages) - 1] = request.pages[-1]

    def retire(self, slot: int) -> None:
        self.first.pop(slot, None)
        for state in (self.active, self.positions, self.block_table):
            state[slot] = 0

    def move(self, source: int, target: int) -> None:
        """A running request changes its slot, so that a smaller graph holds all."""
        for state in (self.tokens, self.positions, self.active, self.block_table):
            state[target] = state[source]
        self.sampler.move(source, target)
        self.retire(source)

    def _send(self, target: torch.Tensor, values: Sequence[int]) -> None:
        """Writes the first elements of `target` without waiting for the device."""
        source = torch.tensor(values, dtype=target.dtype, pin_memory=self.graphs.enabled)
        target[: len(values)].copy_(source, non_blocking=True)

    def _launch(
        self, requests: Sequence[Request], rows: Sequence[int], *tensors: torch.Tensor
    ) -> Launch:
        """Starts the copy to the host, into pinned memory from torch's own cache of it."""
        launch = Launch(list(requests), list(rows), list(tensors))
        if not self.graphs.enabled:
            return launch
        host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for target, tensor in zip(host, tensors, strict=True):
            target.copy_(tensor, non_blocking=True)
        launch.tensors, launch.event = host, torch.cuda.Event()
        launch.event.record()
        return launch

"""The model on a GPU: CUDA graphs for decode batches and prompts, picks on the device."""

import torch
from torch import Tensor

from .buffers import (
    MAX_ROWS,
    PICK_BLOCKS,
    Buffers,
    SlotState,
    context_positions,
    defines,
    rope_table,
)
from .cache import Cache
from .config import Config
from .cuda import Kernels
from .naive import Segments
from .prefill import Prefill
from .single import SingleStep
from .steps import BatchedStep, Step, pick_args
from .weights import Weights

BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32)
PREFILL_SIZES = (64, 128, 256, 512, 1024)
RING = 8  # results on their way to the host


class Picked:
    """Tokens of one launch, read when the host needs them."""

    def __init__(self, buffer: Tensor, event: torch.cuda.Event, tokens: Tensor, rows: int) -> None:
        self._buffer, self._event, self.tokens, self._rows = buffer, event, tokens, rows

    def read(self) -> tuple[list[int], list[float]]:
        """Wait for the copy; token ids and log probabilities."""
        self._event.synchronize()
        tokens, bits = self._buffer[:, : self._rows]
        return tokens.tolist(), bits.view(torch.float32).tolist()


class PrefillGraph:
    """A captured prompt of up to `rows` tokens that begins at position 0, head included."""

    def __init__(self, runner: "CudaRunner", rows: int, pool) -> None:
        self.rows, self.runner = rows, runner
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=runner.device)
        self.where = torch.tensor([runner.cache.scratch, 0, rows], device=runner.device)
        self.host = torch.zeros(rows + 3, dtype=torch.int64).pin_memory()
        self.copied: torch.cuda.Event | None = None
        self._body()  # warms up whatever the capture must not do
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self._body()

    def _body(self) -> None:
        hidden = self.runner.prefill_rows(self.tokens, self.where, 0)
        self.runner.slots.position.index_copy_(0, self.where[:1], self.where[2:])
        self.runner.head(hidden.index_select(0, self.where[2:] - 1))

    def replay(self, slot: int, tokens: list[int]) -> None:
        """Logits of the last token land in the runner's buffers."""
        if self.copied is not None:
            self.copied.synchronize()  # the copies below read this pinned memory
        self.host[: len(tokens)] = torch.tensor(tokens)
        self.host[self.rows :] = torch.tensor([slot, 0, len(tokens)])
        self.tokens.copy_(self.host[: self.rows], non_blocking=True)
        self.where.copy_(self.host[self.rows :], non_blocking=True)
        self.copied = torch.cuda.Event()
        self.copied.record()
        self.graph.replay()


class CudaRunner:
    """Same calls as NaiveRunner."""

    def __init__(self, config: Config, weights: Weights, cache: Cache) -> None:
        if cache.max_batch > MAX_ROWS:
            raise ValueError(f"max_batch: {cache.max_batch} exceeds the kernels' {MAX_ROWS}")
        self.config, self.cache, self.device = config, cache, cache.states.device
        self.weights = weights
        weights.embedding = weights.embedding.to(torch.bfloat16)
        self.kernels = Kernels(defines(config))
        self.sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        slots = cache.max_batch + 1
        make = lambda dtype: torch.zeros(slots, dtype=dtype, device=self.device)  # noqa: E731
        state = SlotState(
            *(make(t) for t in (torch.int64, torch.int64, torch.float32, torch.int64))
        )
        self.slots, self.buffers = state, Buffers(config, self.device)
        rope = rope_table(config, context_positions(cache), self.device)
        common = (config, weights, cache, self.buffers, state, rope)
        self.step_one = SingleStep(*common, 1, self.sms)
        self.head_launch = self.step_one.single("single_head")
        sizes = [b for b in BATCH_SIZES if b < cache.max_batch] + [cache.max_batch]
        self.steps: dict[int, Step] = {
            b: BatchedStep(*common, b, self.sms) if b > 1 else self.step_one for b in sizes
        }
        self.prefill_rows = Prefill(config, weights, cache, self.kernels, rope, self.sms)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.graph_replays, self.decode_steps = 0, 0
        self._rows: list[int] = []
        self._in_graph = False
        self._ring = [torch.zeros(2, MAX_ROWS, dtype=torch.int32).pin_memory() for _ in range(RING)]
        self._ring_slots = torch.zeros(RING, MAX_ROWS, dtype=torch.int32).pin_memory()
        self._next = 0
        self.prompts: dict[int, PrefillGraph] = {}
        self._capture()

    def _capture(self) -> None:
        """Record every decode step, largest first, with all rows on the scratch slot."""
        self.buffers.row_slot.fill_(self.cache.scratch)
        pool = None
        for rows in sorted(self.steps, reverse=True):
            self.steps[rows].run(self.kernels)  # sets shared-memory limits before the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.steps[rows].run(self.kernels)
            pool = pool or graph.pool()
            self.graphs[rows] = graph
        for rows in sorted(PREFILL_SIZES, reverse=True):
            if rows <= context_positions(self.cache):
                self.prompts[rows] = PrefillGraph(self, rows, pool)
        self.slots.position.zero_()
        self.buffers.touched.zero_()

    def start(self, slot: int, temperature: float, seed: int) -> None:
        """Set a slot's sampling state before its prefill."""
        self.slots.temperature[slot] = temperature
        self.slots.seed[slot] = seed
        self.slots.position[slot] = 0

    def forward(self, tokens: Tensor, segments: Segments, routing: list | None = None) -> Tensor:
        """Residual stream [T, H] of one segment; head() norms it."""
        where = torch.tensor(segments[0], device=self.device)
        return self.prefill_rows(tokens, where, segments[0][1], routing)

    def head(self, hidden: Tensor) -> Tensor:
        """Float32 logits [1, V] of one row of the residual stream."""
        assert len(hidden) == 1
        self.buffers.x[:1] = hidden
        launch, tag = self.head_launch
        self.step_one.stage(tag, x_only=True)
        self.kernels[launch.kernel].launch(launch.grid, launch.block, launch.args, launch.shared)
        return self.buffers.logits[:1]

    def prefill(self, slot: int, start: int, tokens: list[int], last: bool) -> Tensor | None:
        """Run prompt tokens that begin at `start`; logits [1, V] of the last row if `last`."""
        self._in_graph = False
        rows = [n for n in sorted(self.prompts) if n >= len(tokens)]
        if start == 0 and rows:
            self.prompts[rows[0]].replay(slot, tokens)
            return self.buffers.logits[:1] if last else None
        ids = torch.tensor(tokens, device=self.device)
        hidden = self.forward(ids, [(slot, start, len(tokens))])
        self.slots.position[slot] = start + len(tokens)
        return self.head(hidden[-1:]) if last else None

    def decode(self, slots: list[int]) -> Tensor:
        """Replay the step of the next captured batch size: logits [len(slots), V]."""
        rows = next(b for b in sorted(self.graphs) if b >= len(slots))
        self._set_rows(slots + [self.cache.scratch] * (rows - len(slots)))
        self.graphs[rows].replay()
        self.graph_replays += 1
        self.decode_steps += rows > 1
        self._in_graph = True
        return self.buffers.logits[: len(slots)]

    def _set_rows(self, slots: list[int]) -> None:
        if slots == self._rows:
            return
        host = self._ring_slots[self._next]
        host[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
        self.buffers.row_slot[: len(slots)].copy_(host[: len(slots)], non_blocking=True)
        self._rows = list(slots)

    def pick(self, slots: list[int], logits: Tensor, filtered: Tensor | None = None) -> Picked:
        """The tokens that the graph picked, or picks of `filtered` logits, on their way home."""
        b = self.buffers
        if filtered is not None or not self._in_graph:
            self._set_rows(list(slots))
            source = logits if filtered is None else filtered
            args = pick_args(b, self.slots, source, self.cache.scratch, advance=0)
            self.kernels["pick_part"].launch((PICK_BLOCKS, len(slots)), 256, args)
            self.kernels["pick_final"].launch(1, 32 * len(slots), args)
        host, event = self._ring[self._next], torch.cuda.Event()
        self._next = (self._next + 1) % RING
        host.copy_(b.out, non_blocking=True)
        event.record()
        return Picked(
            host, event, b.out[0].clone() if filtered is not None else b.out[0], len(slots)
        )

    def experts_touched(self) -> float | None:
        """Mean distinct experts of a layer in the batched steps so far."""
        if not self.decode_steps:
            return None
        layers = len(self.config.layer_types)
        return int(self.buffers.touched) / (layers * self.decode_steps)

    def close(self) -> None:
        """Drop graphs before the memory they point to."""
        torch.cuda.synchronize()
        self.graphs.clear()
        self.prompts.clear()
        self.steps.clear()
        self.step_one = self.prefill_rows = self.buffers = None
        self.kernels.close()

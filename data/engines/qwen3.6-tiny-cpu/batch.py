"""The tokens of one model step: chunks of several requests, laid out as rows of one matrix."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import Cache


@dataclass(frozen=True)
class Chunk:
    """The next tokens of one request: positions start, start + 1, ... of its slot."""

    slot: int
    start: int
    tokens: list[int]


class Group:
    """Chunks of one length T as a batch of B, with working copies of their recurrent memory.

    tails [L_linear, B, W-1, C] and states [L_linear, B, H, Dk, Dv] are read from the slots here
    and written back by `store`, once per step.
    """

    def __init__(self, chunks: list[Chunk], first_row: int, cache: Cache) -> None:
        """Gather the slots of `chunks`, whose rows start at `first_row`."""
        self.chunks = chunks
        self.size, self.length = len(chunks), len(chunks[0].tokens)
        self.rows = slice(first_row, first_row + self.size * self.length)
        self._slots = torch.tensor([chunk.slot for chunk in chunks])
        self.tails = cache.tails.index_select(1, self._slots)
        self.states = cache.states.index_select(1, self._slots)

    def store(self, cache: Cache) -> None:
        """Write tails and states back to the slots of this group's own rows."""
        cache.tails.index_copy_(1, self._slots, self.tails)
        cache.states.index_copy_(1, self._slots, self.states)


class Batch:
    """One step's rows: single tokens of all requests first (one group), then each longer chunk."""

    def __init__(self, chunks: list[Chunk], cache: Cache) -> None:
        """Lay out `chunks`, at least one; rows of one chunk are adjacent and in order."""
        single = [chunk for chunk in chunks if len(chunk.tokens) == 1]
        parts = [single] if single else []
        parts += [[chunk] for chunk in chunks if len(chunk.tokens) > 1]
        self.cache = cache
        self.groups: list[Group] = []
        first_row = 0
        for part in parts:
            self.groups.append(Group(part, first_row, cache))
            first_row = self.groups[-1].rows.stop
        ordered = [chunk for part in parts for chunk in part]
        self.tokens = torch.tensor([token for chunk in ordered for token in chunk.tokens])
        self.positions = torch.tensor(
            [chunk.start + i for chunk in ordered for i in range(len(chunk.tokens))]
        )
        self._first = {}
        row = 0
        for chunk in ordered:
            self._first[chunk.slot] = row
            row += len(chunk.tokens)

    def row(self, chunk: Chunk, index: int) -> int:
        """Row of the chunk's token `index` (negative: from its end)."""
        return self._first[chunk.slot] + index % len(chunk.tokens)

    def store(self) -> None:
        """Write what the step changed back to the slots."""
        for group in self.groups:
            group.store(self.cache)


def merge(parts: list[Tensor]) -> Tensor:
    """Rows of the groups, in order, as one matrix."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)

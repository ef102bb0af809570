"""The tokens of one step, laid out as rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch


@dataclass(frozen=True)
class Chunk:
    """The next tokens of one sequence; start of them are in its slot of the cache already."""

    slot: int
    start: int
    tokens: Sequence[int]


@dataclass(frozen=True)
class Group:
    """Chunks of one length, which a recurrence can take side by side.

    rows: their rows of the batch, chunk after chunk; slots [B], an index into the cache.
    """

    chunks: tuple[Chunk, ...]
    length: int
    rows: slice
    slots: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """tokens [T], positions [T] (float64), the groups in row order, each chunk's last row."""

    tokens: torch.Tensor
    positions: torch.Tensor
    groups: tuple[Group, ...]
    last_rows: torch.Tensor


def build_batch(chunks: Sequence[Chunk]) -> Batch:
    """Lay chunks out in the given order; only neighbours of equal length become one group."""
    tokens: list[int] = []
    positions: list[int] = []
    groups: list[Group] = []
    last_rows: list[int] = []
    for length, members in groupby(chunks, key=lambda chunk: len(chunk.tokens)):
        first, same = len(tokens), tuple(members)
        for chunk in same:
            tokens.extend(chunk.tokens)
            positions.extend(range(chunk.start, chunk.start + length))
            last_rows.append(len(tokens) - 1)
        slots = torch.tensor([chunk.slot for chunk in same])
        groups.append(Group(same, length, slice(first, len(tokens)), slots))
    rows = torch.tensor(last_rows)
    places = torch.tensor(positions, dtype=torch.float64)
    return Batch(torch.tensor(tokens), places, tuple(groups), rows)

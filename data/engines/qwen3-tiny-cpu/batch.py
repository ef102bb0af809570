"""The tokens of one forward pass: chunks of several requests as rows of one matrix."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

# Prompt tokens computed in one pass: enough for efficient products, few enough that a long prompt
# does not hold up the requests that decode beside it.
PREFILL_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one request that are fed now, at positions start, start + 1, ..."""

    slot: int
    start: int
    tokens: list[int]

    @property
    def end(self) -> int:
        """Number of tokens in the cache after this chunk."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Chunks of one length in adjacent slots: one attention call over views of the cache."""

    rows: slice  # of the batch
    slots: slice  # of the cache, n of them
    length: int  # T, tokens of each chunk
    context: int  # P, cache positions to read
    mask: Tensor | None  # additive [n, 1, G * T, P], G query heads per key/value head


@dataclass(frozen=True, slots=True)
class Batch:
    """All chunks of one pass, in ascending order of slots."""

    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    slots: Tensor  # [rows]
    groups: list[AttentionGroup]


def make_batch(chunks: list[Chunk], queries_per_kv: int) -> Batch:
    """Lay out chunks, which are in ascending order of slots, as rows."""
    return Batch(
        tokens=torch.tensor([token for chunk in chunks for token in chunk.tokens]),
        positions=torch.tensor([p for chunk in chunks for p in range(chunk.start, chunk.end)]),
        slots=torch.tensor([chunk.slot for chunk in chunks for _ in chunk.tokens]),
        groups=list(_groups(chunks, queries_per_kv)),
    )


def _groups(chunks: list[Chunk], queries_per_kv: int) -> Iterator[AttentionGroup]:
    # Slot minus rank is constant along a run of adjacent slots.
    ranked = enumerate(chunks)
    runs = groupby(ranked, lambda pair: (len(pair[1].tokens), pair[1].slot - pair[0]))
    first_row = 0
    for (length, _), run in runs:
        members = [chunk for _, chunk in run]
        rows = slice(first_row, first_row + length * len(members))
        slots = slice(members[0].slot, members[-1].slot + 1)
        context = max(chunk.end for chunk in members)
        mask = _mask(members, length, context, queries_per_kv)
        yield AttentionGroup(rows, slots, length, context, mask)
        first_row = rows.stop


def _mask(members: list[Chunk], length: int, context: int, repeats: int) -> Tensor | None:
    """-inf where a position lies beyond the query's own; None where every position counts."""
    if length == 1 and all(chunk.end == context for chunk in members):
        return None
    starts = torch.tensor([chunk.start for chunk in members])
    queries = (starts[:, None] + torch.arange(length)).view(-1, 1, 1, length, 1)
    mask = torch.zeros(len(members), 1, 1, length, context)
    mask.masked_fill_(torch.arange(context) > queries, float("-inf"))
    return mask.expand(-1, -1, repeats, -1, -1).reshape(len(members), 1, -1, context)

"""Attention of one request's new tokens over its cached keys and values."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import KVCache


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one request fed in one pass, at positions start .. start + len(tokens) - 1."""

    slot: int
    start: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Span:
    """A chunk's views into the buffers of a pass and, for every layer, into the cache.

    All are made once per pass: in a decode step a view costs as much as the arithmetic on it.
    """

    query: Tensor  # [K, n, G, D], view of the pass's qkv
    query_shape: tuple[int, ...]  # [K, 1, n * G, D]
    fresh: Tensor  # [2K, n, D], view of the pass's qkv: the chunk's keys and values
    mixed: Tensor  # [K, n, G, D], view of the pass's attention output
    stored: tuple[Tensor, ...]  # [2K, n, D], where the cache keeps fresh
    keys: tuple[Tensor, ...]  # [K, 1, P, D], the valid prefix, the chunk included
    values: tuple[Tensor, ...]  # [K, 1, P, D]
    mask: Tensor | None  # [n * G, P], None for a single token, which sees all of the prefix

    def attend(self, layer: int) -> None:
        """Store the chunk's keys and values, then fill mixed from the query and the prefix.

        The n * G queries that share a kv head are the rows of one product, so that keys and
        values are read once and never repeated; for a single token the reshape is a view.
        """
        self.stored[layer].copy_(self.fresh)
        mixed = F.scaled_dot_product_attention(
            self.query.reshape(self.query_shape),
            self.keys[layer],
            self.values[layer],
            attn_mask=self.mask,
        )
        self.mixed.copy_(mixed.view_as(self.mixed))


def make_spans(
    cache: KVCache, chunks: list[Chunk], heads: Tensor, mixed: Tensor, kv_heads: int
) -> list[Span]:
    """One span per chunk, laid end to end over heads [T, N + 2K, D] and mixed [T, N, D]."""
    spans, first = [], 0
    for chunk in chunks:
        rows = slice(first, first + len(chunk.tokens))
        spans.append(_span(cache, chunk, heads[rows], mixed[rows], kv_heads))
        first = rows.stop
    return spans


def _span(cache: KVCache, chunk: Chunk, heads: Tensor, mixed: Tensor, kv_heads: int) -> Span:
    count, num_heads, dim = mixed.shape
    group = num_heads // kv_heads
    end = chunk.start + count
    slot = cache.data[:, chunk.slot]
    prefix = slot[:, :, :end].unsqueeze(2)
    return Span(
        query=heads[:, :num_heads].view(count, kv_heads, group, dim).transpose(0, 1),
        query_shape=(kv_heads, 1, count * group, dim),
        fresh=heads[:, num_heads:].transpose(0, 1),
        mixed=mixed.view(count, kv_heads, group, dim).transpose(0, 1),
        stored=slot[:, :, chunk.start : end].unbind(0),
        keys=prefix[:, :kv_heads].unbind(0),
        values=prefix[:, kv_heads:].unbind(0),
        mask=None if count == 1 else _causal_mask(chunk.start, count, group),
    )


def _causal_mask(start: int, count: int, group: int) -> Tensor:
    """Additive mask [count * group, start + count]: token t sees positions 0 .. start + t."""
    future = torch.full((count, start + count), -math.inf).triu_(start + 1)
    return future.repeat_interleave(group, dim=0)

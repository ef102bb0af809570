"""The forward pass of a dense Qwen3 decoder over a batch of token runs."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import KVCache
from .config import Config
from .weights import Layer, Weights


class Segment(NamedTuple):
    """Consecutive tokens of one sequence to compute; `start` of them are in the cache already."""

    slot: int
    start: int
    tokens: list[int]


class Decode(NamedTuple):
    """The sequences that feed one token: the first `count` rows of the batch."""

    count: int
    slots: slice | Tensor
    length: int
    mask: Tensor | None  # additive [count, 1, 1, length]


class Prefill(NamedTuple):
    """A sequence that feeds several tokens: rows begin..end of the batch."""

    begin: int
    end: int
    slot: int
    length: int
    mask: Tensor  # additive [end - begin, length]


@dataclass(frozen=True, slots=True)
class Batch:
    """What all layers share in one forward pass over T tokens."""

    rotation: Tensor  # complex [T, 1, D/2]
    cache_rows: Tensor  # [T, K]
    decode: Decode | None
    prefills: list[Prefill]


class Model:
    """Weights and rotary table of one model."""

    def __init__(self, config: Config, weights: Weights, max_context: int) -> None:
        self._config = config
        self._weights = weights
        self._rotations = rotations(config, max_context)
        self._hidden_floor = norm_floor(config.hidden_size, config.rms_norm_eps)
        self._head_floor = norm_floor(config.head_dim, config.rms_norm_eps)

    def forward(self, segments: list[Segment], cache: KVCache, rows: list[int]) -> Tensor:
        """Compute the segments, T tokens in all, and write their keys and values to the cache.

        Segments of one token come first. Returns the logits [len(rows), V] that follow the tokens
        at `rows`, indices into the T tokens in the order of the segments.
        """
        batch = self._prepare(segments, cache)
        ids = torch.tensor([token for segment in segments for token in segment.tokens])
        hidden = self._weights.embed.index_select(0, ids)
        for layer, keys, values in zip(
            self._weights.layers, cache.keys, cache.values, strict=True
        ):
            attended = self._attention(layer, hidden, batch, keys, values)
            hidden.addmm_(attended, layer.o_t)
            gate_up = F.linear(normalise(hidden, self._hidden_floor), layer.gate_up)
            gate, up = gate_up.chunk(2, -1)
            hidden.addmm_(F.silu(gate).mul_(up), layer.down_t)
        last = hidden.index_select(0, torch.tensor(rows, dtype=torch.int64))
        last = normalise(last, self._hidden_floor).mul_(self._weights.norm)
        return F.linear(last, self._weights.head)

    def _prepare(self, segments: list[Segment], cache: KVCache) -> Batch:
        """Work out what does not depend on the layer."""
        slots = [segment.slot for segment in segments for _ in segment.tokens]
        positions = [s.start + i for s in segments for i in range(len(s.tokens))]
        singles = [segment for segment in segments if len(segment.tokens) == 1]
        return Batch(
            rotation=self._rotations.index_select(0, torch.tensor(positions)).unsqueeze(1),
            cache_rows=cache.rows(slots, positions),
            decode=plan_decode(singles) if singles else None,
            prefills=plan_prefills(segments[len(singles) :], len(singles)),
        )

    def _attention(
        self, layer: Layer, hidden: Tensor, batch: Batch, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attention of one layer over hidden [T, E], before the output matrix: [T, N·D]."""
        heads, kv_heads = self._config.num_attention_heads, self._config.num_key_value_heads
        dim = self._config.head_dim
        qkv = F.linear(normalise(hidden, self._hidden_floor), layer.qkv).view(len(hidden), -1, dim)
        qk = normalise(qkv[:, : heads + kv_heads], self._head_floor).mul_(layer.qk_norm)
        qk = rotate(qk, batch.rotation)
        at = (batch.cache_rows,)
        keys.view(-1, dim).index_put_(at, qk[:, heads:])
        values.view(-1, dim).index_put_(at, qkv[:, heads + kv_heads :])
        query = qk[:, :heads]
        parts = [prefill_attention(query, keys, values, prefill) for prefill in batch.prefills]
        if batch.decode is not None:
            parts.insert(0, decode_attention(query, keys, values, batch.decode))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def rotations(config: Config, max_context: int) -> Tensor:
    """RoPE (Su et al. 2021) as complex numbers [max_context, D/2]: e^(i p theta^(-2i/D))."""
    half = torch.arange(config.head_dim // 2, dtype=torch.float64)
    frequencies = config.rope_theta ** (-2 * half / config.head_dim)
    angles = torch.outer(torch.arange(max_context, dtype=torch.float64), frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn the pairs of each head: x [T, heads, D], rotation complex [T, 1, D/2]."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2)


def norm_floor(width: int, eps: float) -> Tensor:
    """What `normalise` needs of RMSNorm's eps over `width` values: sqrt(width · eps)."""
    return torch.tensor(math.sqrt(width * eps), dtype=torch.float32)


def normalise(x: Tensor, floor: Tensor) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019) over the last axis, without weight and sqrt(C).

    x / sqrt(mean(x²) + eps) = sqrt(C) · x / sqrt(sum(x²) + C·eps); sqrt(C) is in the weights.
    """
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(floor)


def plan_decode(segments: list[Segment]) -> Decode:
    """Pad sequences of different lengths to the longest; no mask where they are equal."""
    lengths = [segment.start + 1 for segment in segments]
    slots = [segment.slot for segment in segments]
    longest = max(lengths)
    mask = None
    if min(lengths) < longest:
        beyond = torch.arange(longest) >= torch.tensor(lengths).unsqueeze(1)
        mask = additive(beyond)[:, None, None]
    # Neighbouring slots are read in place; others have to be gathered.
    adjacent = slots == list(range(slots[0], slots[0] + len(slots)))
    select = slice(slots[0], slots[0] + len(slots)) if adjacent else torch.tensor(slots)
    return Decode(len(segments), select, longest, mask)


def plan_prefills(segments: list[Segment], begin: int) -> list[Prefill]:
    """Rows and causal masks of runs of several tokens; the first starts at row `begin`."""
    prefills = []
    for slot, start, tokens in segments:
        length = start + len(tokens)
        beyond = torch.arange(length) > torch.arange(start, length).unsqueeze(1)
        prefills.append(Prefill(begin, begin + len(tokens), slot, length, additive(beyond)))
        begin += len(tokens)
    return prefills


def additive(beyond: Tensor) -> Tensor:
    """0 where a position may be seen, -inf where not."""
    return torch.zeros(beyond.shape).masked_fill_(beyond, -math.inf)


def decode_attention(query: Tensor, keys: Tensor, values: Tensor, decode: Decode) -> Tensor:
    """One query per sequence: query [T, N, D], keys and values [slots, K, P, D] -> [count, N·D].

    The N/K query heads of a kv head stand where attention has query positions, since all of
    them see the same positions: each key is read once.
    """
    count, slots, length, mask = decode
    grouped = query[:count].unflatten(1, (keys.shape[1], -1))
    seen = keys[:, :, :length][slots], values[:, :, :length][slots]
    return F.scaled_dot_product_attention(grouped, *seen, attn_mask=mask).flatten(1)


def prefill_attention(query: Tensor, keys: Tensor, values: Tensor, prefill: Prefill) -> Tensor:
    """A run of tokens of one sequence, causal: query [T, N, D] -> [end - begin, N·D]."""
    begin, end, slot, length, mask = prefill
    run = query[begin:end].transpose(0, 1).unsqueeze(0)
    seen = keys[None, slot, :, :length], values[None, slot, :, :length]
    attended = F.scaled_dot_product_attention(run, *seen, attn_mask=mask, enable_gqa=True)
    return attended[0].transpose(0, 1).flatten(1)

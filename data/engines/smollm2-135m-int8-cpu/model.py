"""The decoder: embedding, attention and MLP layers, head."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import KVCache
from .config import ModelConfig
from .quant import Int8Embedding, Int8Linear, quantize_rows
from .weights import Weights


class Span(NamedTuple):
    """Consecutive tokens of one request: `length` of them from position `start` on."""

    slot: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; q, k, v and gate, up are fused by rows."""

    input_norm: Tensor
    qkv: Int8Linear
    out: Int8Linear
    post_norm: Tensor
    gate_up: Int8Linear
    down: Int8Linear


class Model:
    """Computes hidden states of token rows against a KV cache, and logits of hidden states."""

    def __init__(self, config: ModelConfig, weights: Weights, max_context: int) -> None:
        """Read and quantise all weights, one tensor after the other."""
        self._config = config
        self._norm_shape = (config.hidden_size,)
        codes, scale = quantize_rows(weights.read("model.embed_tokens.weight"))
        self._embed = Int8Embedding(codes, scale)
        if config.tied:
            self._head = Int8Linear(codes, scale)
        else:
            self._head = Int8Linear.from_rows(weights.read("lm_head.weight"))
        self._layers = [_read_layer(config, weights, i) for i in range(config.num_layers)]
        self._norm = weights.read("model.norm.weight")
        self._rotation = rotation_table(config, max_context)

    def forward(self, tokens: Tensor, spans: list[Span], cache: KVCache) -> Tensor:
        """Feed the spans' tokens int64 [T], one span after the other; hidden states [T, E].

        Writes the tokens' keys and values to the cache at their positions.
        """
        config = self._config
        rows, all_heads = len(tokens), config.num_heads + 2 * config.num_kv_heads
        rotation = torch.cat([self._rotation.narrow(0, s.start, s.length) for s in spans])
        groups = config.num_heads // config.num_kv_heads
        masks = [causal_mask(span, groups) for span in spans]
        hidden = self._embed(tokens)
        for layer, slots in zip(self._layers, cache.layers, strict=True):
            x = self._normed(hidden, layer.input_norm)
            heads = layer.qkv(x).view(rows, all_heads, config.head_dim)
            self._rotate(heads, rotation)
            hidden.add_(layer.out(self._attend(heads, spans, masks, slots)))
            x = self._normed(hidden, layer.post_norm)
            gate, up = layer.gate_up(x).chunk(2, -1)
            hidden.add_(layer.down(F.silu(gate).mul_(up)))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, E] -> next-token logits float32 [R, V]."""
        return self._head(self._normed(hidden, self._norm))

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Root-mean-square norm over the last axis."""
        return F.rms_norm(hidden, self._norm_shape, weight, self._config.rms_norm_eps)

    def _rotate(self, heads: Tensor, rotation: Tensor) -> None:
        """Apply RoPE in place to the queries and keys of [T, N + 2K, D]."""
        config = self._config
        count = config.num_heads + config.num_kv_heads
        pairs = heads.narrow(1, 0, count).unflatten(2, (config.head_dim // 2, 2))
        torch.view_as_complex(pairs).mul_(rotation)

    def _attend(
        self, heads: Tensor, spans: list[Span], masks: list[Tensor | None], slots: list[Tensor]
    ) -> Tensor:
        """Attention of every span over its own slot; [T, N + 2K, D] -> [T, N * D]."""
        if len(spans) == 1:
            return self._attend_span(heads, spans[0], masks[0], slots[spans[0].slot])
        parts = heads.split([span.length for span in spans])
        outs = [
            self._attend_span(part, span, mask, slots[span.slot])
            for part, span, mask in zip(parts, spans, masks, strict=True)
        ]
        return torch.cat(outs)

    def _attend_span(self, heads: Tensor, span: Span, mask: Tensor | None, kv: Tensor) -> Tensor:
        """Store a span's keys and values in kv [2, 1, K, C, D], then attend to the valid prefix.

        Query heads of one kv head are laid out as rows of it, [1, K, length * N/K, D].
        """
        n, k, d = self._config.num_heads, self._config.num_kv_heads, self._config.head_dim
        length = span.length
        new = heads.narrow(1, n, 2 * k).view(length, 2, 1, k, d).permute(1, 2, 3, 0, 4)
        kv.narrow(3, span.start, length).copy_(new)
        keys, values = kv.narrow(3, 0, span.start + length).unbind(0)
        queries = heads.narrow(1, 0, n).view(length, k, n // k, d).transpose(0, 1)
        queries = queries.reshape(1, k, length * (n // k), d)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return out.view(k, length, n // k * d).transpose(0, 1).reshape(length, n * d)


def rotation_table(config: ModelConfig, max_context: int) -> Tensor:
    """cos + i sin of position * theta^(-2i/D), complex64 [max_context, 1, D/2]."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = torch.outer(
        torch.arange(max_context, dtype=torch.float64), config.rope_theta**-steps
    )
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None]


def causal_mask(span: Span, groups: int) -> Tensor | None:
    """Additive mask [length * groups, start + length]; a single token sees all, without one."""
    if span.length == 1:
        return None
    rows = torch.arange(span.start, span.start + span.length).repeat_interleave(groups)
    hidden = torch.arange(span.start + span.length) > rows[:, None]
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def pair_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder each head's rows of [heads * D, in] so that row i stands beside row i + D/2.

    RoPE then is one complex product over adjacent numbers. Queries and keys are reordered
    alike, which leaves their dot products unchanged.
    """
    halves = weight.view(-1, 2, head_dim // 2, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def _read_layer(config: ModelConfig, weights: Weights, index: int) -> Layer:
    """Read, fuse and quantise one layer."""

    def read(name: str) -> Tensor:
        return weights.read(f"model.layers.{index}.{name}.weight")

    return Layer(
        input_norm=read("input_layernorm"),
        qkv=Int8Linear.from_rows(
            pair_halves(read("self_attn.q_proj"), config.head_dim),
            pair_halves(read("self_attn.k_proj"), config.head_dim),
            read("self_attn.v_proj"),
        ),
        out=Int8Linear.from_rows(read("self_attn.o_proj")),
        post_norm=read("post_attention_layernorm"),
        gate_up=Int8Linear.from_rows(read("mlp.gate_proj"), read("mlp.up_proj")),
        down=Int8Linear.from_rows(read("mlp.down_proj")),
    )

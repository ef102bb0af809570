"""Forward pass of the dense Qwen3 decoder.

Symbols: E hidden_size, N query heads, K key/value heads, G = N / K, D head_dim, F MLP width,
V vocab_size. Weights are [out, in] and carry no bias.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .batch import AttentionGroup, Batch
from .cache import KVCache
from .config import ModelConfig
from .weights import LayerWeights, ModelWeights


def rope_table(config: ModelConfig, max_context: int) -> Tensor:
    """Cosines and signed sines [max_context, 2, 1, D] of half-split RoPE (Su et al. 2021).

    With a = p * theta^(-2i/D): x1 cos a - x2 sin a and x2 cos a + x1 sin a are x * cos + roll(x,
    D/2) * sin, where cos = (cos a, cos a) and sin = (-sin a, sin a).
    """
    half = torch.arange(config.head_dim // 2, dtype=torch.float64)
    frequencies = config.rope_theta ** (-2 * half / config.head_dim)
    angles = torch.arange(max_context, dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
    return table.float().unsqueeze(2)


class Qwen3:
    """The model's weights and the pass over them; positions up to max_context."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, max_context: int) -> None:
        self.config = config
        self.queries_per_kv = config.num_heads // config.num_kv_heads
        self._weights = weights
        self._rope = rope_table(config, max_context)
        # Row per head, queries first: both norms are one product over the fused projection.
        heads = torch.tensor([config.num_heads, config.num_kv_heads])
        self._qk_norms = [
            torch.stack([layer.q_norm, layer.k_norm]).repeat_interleave(heads, 0)
            for layer in weights.layers
        ]

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Feed a batch, append its keys and values to the cache; last layer's states [rows, E]."""
        hidden = F.embedding(batch.tokens, self._weights.embedding)
        cos, sin = self._rope[batch.positions].unbind(1)
        layers = zip(self._weights.layers, self._qk_norms, cache.layers, strict=True)
        for layer, qk_norm, kv in layers:
            x = self._norm(hidden, layer.input_norm)
            queries = self._project(x, layer, qk_norm, cos, sin, batch, kv)
            attended = self._attention(queries, batch, kv)
            hidden.addmm_(attended, layer.output.t())
            gate, up = F.linear(self._norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            hidden.addmm_(F.silu(gate).mul_(up), layer.down.t())
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, V] of last-layer states [rows, E]."""
        return F.linear(self._norm(hidden, self._weights.norm), self._weights.head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """w * x / sqrt(mean(x^2) + eps) over the last axis (Zhang and Sennrich 2019)."""
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _project(
        self,
        x: Tensor,
        layer: LayerWeights,
        qk_norm: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: Batch,
        kv: Tensor,
    ) -> Tensor:
        """Queries [rows, N * D] of x [rows, E]; keys and values go to kv [2, slots, K, P, D]."""
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = F.linear(x, layer.qkv)
        qk = qkv[:, : (heads + kv_heads) * dim].view(-1, heads + kv_heads, dim)
        normed = F.rms_norm(qk, (dim,), None, config.rms_norm_eps).mul_(qk_norm)
        # The result overwrites the raw projection, where keys and values stay adjacent.
        torch.mul(normed, cos, out=qk).addcmul_(normed.roll(dim // 2, -1), sin)
        key_value = qkv[:, heads * dim :].view(-1, 2, kv_heads, dim)
        kv[:, batch.slots, :, batch.positions] = key_value
        return qkv[:, : heads * dim]

    def _attention(self, queries: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        """Causal grouped-query attention of queries [rows, N * D] over kv [2, slots, K, P, D]."""
        attended = queries.new_empty(queries.shape)
        for group in batch.groups:
            self._attend(queries[group.rows], attended[group.rows], group, kv)
        return attended

    def _attend(
        self, queries: Tensor, attended: Tensor, group: AttentionGroup, kv: Tensor
    ) -> None:
        """Attention of one group; fills attended [n * T, N * D].

        The G query heads of a key/value head are rows of one product, so that keys and values
        are read as they lie, without a repeated copy. Scores are scaled by 1 / sqrt(D).
        """
        kv_heads, dim = self.config.num_kv_heads, self.config.head_dim
        split = (-1, group.length, kv_heads, self.queries_per_kv, dim)
        q = queries.view(split).permute(0, 2, 3, 1, 4)  # [n, K, G, T, D]
        keys, values = kv[:, group.slots, :, : group.context]
        out = F.scaled_dot_product_attention(q.flatten(2, 3), keys, values, group.mask)
        attended.view(split).copy_(out.view(q.shape).permute(0, 3, 1, 2, 4))

"""Forward pass of the dense decoder over a flat batch of tokens from several requests."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import Chunk, make_spans
from .cache import KVCache
from .config import ModelConfig
from .weights import Weights


class Model:
    """Weights, the RoPE table and the pass that turns tokens into logits."""

    def __init__(self, config: ModelConfig, weights: Weights, max_context: int) -> None:
        self._config = config
        self._weights = weights
        self._root_eps = torch.tensor(math.sqrt(config.hidden_size * config.rms_norm_eps))
        self._rope = rope_table(config, max_context)

    def forward(self, cache: KVCache, chunks: list[Chunk], rows: list[int]) -> Tensor:
        """Feed the chunks, writing their keys and values; return logits [len(rows), V].

        Chunks are laid end to end as one [T, E] matrix; rows are the indices into it whose
        next token is wanted. Each chunk needs its positions before start in its slot.
        """
        tokens = [token for chunk in chunks for token in chunk.tokens]
        positions = [chunk.start + i for chunk in chunks for i in range(len(chunk.tokens))]
        rope = self._rope.index_select(0, torch.tensor(positions))
        hidden = F.embedding(torch.tensor(tokens), self._weights.embedding)
        self._run_layers(cache, chunks, hidden, rope)
        last = hidden.index_select(0, torch.tensor(rows, dtype=torch.int64))
        unit_rows(last, self._root_eps, last)
        return torch.mm(last.mul_(self._weights.norm), self._weights.head)

    def _run_layers(
        self, cache: KVCache, chunks: list[Chunk], hidden: Tensor, rope: Tensor
    ) -> None:
        """Update hidden [T, E] in place; rope is [T, 1, D/2].

        Buffers and their views are made once and shared by all layers.
        """
        config, count, root_eps = self._config, len(hidden), self._root_eps
        heads, kv_heads, dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        unit = torch.empty_like(hidden)
        qkv = hidden.new_empty(count, (heads + 2 * kv_heads) * dim)
        mixed = hidden.new_empty(count, heads * dim)
        gate_up = hidden.new_empty(count, 2 * config.intermediate_size)
        gate, up = gate_up.chunk(2, dim=1)
        pairs = qkv.view(torch.complex64).view(count, -1, dim // 2)[:, : heads + kv_heads]
        spans = make_spans(
            cache, chunks, qkv.view(count, -1, dim), mixed.view(count, heads, dim), kv_heads
        )
        for index, layer in enumerate(self._weights.layers):
            unit_rows(hidden, root_eps, unit)
            torch.mm(unit, layer.qkv, out=qkv)
            pairs.mul_(rope)
            for span in spans:
                span.attend(index)
            hidden.addmm_(mixed, layer.out)
            unit_rows(hidden, root_eps, unit)
            torch.mm(unit, layer.gate_up, out=gate_up)
            hidden.addmm_(F.silu(gate, inplace=True).mul_(up), layer.down)


def unit_rows(hidden: Tensor, root_eps: Tensor, out: Tensor) -> None:
    """out = hidden [T, E] / sqrt(sum of squares + E * eps), with root_eps = sqrt(E * eps).

    RMSNorm without its factor sqrt(E) * weight, which load_weights folds into what follows.
    """
    length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
    torch.div(hidden, torch.hypot(length, root_eps), out=out)


def rope_table(config: ModelConfig, max_context: int) -> Tensor:
    """exp(i * p * theta^(-2j/D)) as complex64 [max_context, 1, D/2], computed in float64."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    positions = torch.arange(max_context, dtype=torch.float64)
    angles = torch.outer(positions, config.rope_theta**-exponents).unsqueeze(1)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)

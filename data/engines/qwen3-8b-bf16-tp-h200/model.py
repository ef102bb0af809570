"""The forward pass: a decode step of up to 32 sequences, and a chunk of one prompt."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .config import PAGE, ModelConfig
from .group import Group
from .operators import bind, rope_tables
from .weights import Layer, Weights


@dataclass
class KVCache:
    """Pages of every layer; page 0 is scratch, where padded rows write."""

    keys: torch.Tensor  # [layers, pages, kv heads, 64, D]
    values: torch.Tensor

    @staticmethod
    def page_bytes(c: ModelConfig, dtype: torch.dtype) -> int:
        return 2 * c.num_hidden_layers * c.num_key_value_heads * PAGE * c.head_dim * dtype.itemsize


def empty_cache(c: ModelConfig, pages: int, device: str, dtype: torch.dtype) -> KVCache:
    shape = (c.num_hidden_layers, pages, c.num_key_value_heads, PAGE, c.head_dim)
    return KVCache(
        torch.zeros(shape, device=device, dtype=dtype),
        torch.zeros(shape, device=device, dtype=dtype),
    )


class Model:
    """Weights, caches and operators of one rank, `config` being its shard; keeps no state of
    requests.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: Group,
        weights: Weights,
        cache: KVCache,
        max_context: int,
    ):
        self.config, self.group, self.weights, self.cache = config, group, weights, cache
        device, dtype = str(weights.norm.device), weights.norm.dtype
        self.rope = rope_tables(config, max_context, device, dtype)
        self.operators = bind(device)
        norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.norm]
        self._layers = list(zip(weights.layers, norms, cache.keys, cache.values, strict=True))

    def decode(
        self, tokens: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor
    ) -> torch.Tensor:
        """Logits [M, V / world] after one more token per row: tokens [M] int64, positions [M]
        int32, block_table [M, pages].
        """
        ops, eps = self.operators, self.config.rms_norm_eps
        row = ops.weigh_rows(self.weights.embedding, tokens, self.weights.layers[0].input_norm)
        for layer, next_norm, keys, values in self._layers:
            residual, x, squares = row
            qkv = ops.qkv_product(x, squares, layer.qkv, eps)
            past = (self.rope, keys, values, block_table, positions)
            heads = ops.decode_attention(qkv, layer.q_norm, layer.k_norm, *past, eps)
            row = self._finish_layer(heads, residual, layer, next_norm)
        return ops.head_product(*row[1:], self.weights.head, eps)

    def _finish_layer(
        self, heads: torch.Tensor, residual: torch.Tensor, layer: Layer, next_norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ops, group = self.operators, self.group
        residual, x, squares = ops.output_product(
            heads, layer.output, residual, layer.post_norm, group
        )
        hidden = ops.gate_up_product(x, squares, layer.gate_up, self.config.rms_norm_eps)
        return ops.down_product(hidden, layer.down, residual, next_norm, group)

    def prefill(
        self,
        tokens: torch.Tensor,
        block_table: torch.Tensor,
        start: torch.Tensor,
        count: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs a chunk [T] at positions start.. through all layers but the last one's second half.

        Returns that layer's attention output [T, heads * D] and residual [T, H]: `logits` finishes
        only the rows asked for, which saves 2 % of a prompt's arithmetic.
        """
        ops, eps, reduce = self.operators, self.config.rms_norm_eps, self.group.sum
        residual = F.embedding(tokens, self.weights.embedding)
        residual, delta = residual.to(torch.promote_types(residual.dtype, torch.float32)), None
        for index, (layer, _, keys, values) in enumerate(self._layers):
            residual, x = ops.add_norm(residual, delta, layer.input_norm, eps)
            qkv = F.linear(x, layer.qkv)
            query = ops.rotate_and_store(
                qkv,
                layer.q_norm,
                layer.k_norm,
                self.rope,
                keys,
                values,
                block_table,
                start,
                count,
                eps,
            )
            heads = ops.prefill_attention(query, keys, values, block_table, start, count)
            if index + 1 == len(self._layers):
                return heads, residual
            delta = reduce(F.linear(heads, layer.output))
            residual, x = ops.add_norm(residual, delta, layer.post_norm, eps)
            delta = reduce(F.linear(ops.silu_multiply(F.linear(x, layer.gate_up)), layer.down))
        raise AssertionError("a model has at least one layer")

    def logits(
        self, heads: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Logits [n, V / world] of at most 32 rows (int64 [n]) of what `prefill` returned."""
        layer, norm = self._layers[-1][:2]
        _, x, squares = self._finish_layer(heads[rows], residual[rows], layer, norm)
        return self.operators.head_product(x, squares, self.weights.head, self.config.rms_norm_eps)

"""The decoder's layers in order, over a ragged batch: several sequences, each some tokens long."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import BlockCache, NoCache
from .config import Config
from .operators import attention, linear, rms_norm, rope, rope_table, swiglu
from .parallel import Group


@dataclass
class Sequence:
    """The part of a request that one step computes: `tokens` at positions start, start + 1, …"""

    tokens: list[int]
    start: int
    block_table: list[int]


class Model:
    """Weights and formulas; no state of any request."""

    def __init__(self, config: Config, weights: dict[str, Tensor], max_context: int, group: Group):
        self.config = config
        self.group = group
        self.weights = weights
        self.angles = rope_table(max_context, config.head_dim, config.rope_theta)

    def forward(self, sequences: list[Sequence], cache: BlockCache | NoCache) -> Tensor:
        """Final hidden states [T, hidden], the tokens of all sequences one after another."""
        tokens = [token for sequence in sequences for token in sequence.tokens]
        positions = [s.start + i for s in sequences for i in range(len(s.tokens))]
        angles = self.angles[positions]
        hidden = self.group.embed(self.weights["model.embed_tokens.weight"], tokens)
        for layer in range(self.config.num_hidden_layers):
            hidden = hidden + self._attention(layer, hidden, angles, sequences, cache)
            hidden = hidden + self._mlp(layer, hidden)
        return self._norm(hidden, "model.norm")

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocab] of final hidden states [rows, hidden]."""
        return self.group.join_columns(self._own_logits(hidden))

    def _own_logits(self, hidden: Tensor) -> Tensor:
        tied = self.config.tie_word_embeddings
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return linear(hidden, self.weights[head]).float()

    def _attention(
        self,
        layer: int,
        hidden: Tensor,
        angles: Tensor,
        sequences: list[Sequence],
        cache: BlockCache | NoCache,
    ) -> Tensor:
        prefix = f"model.layers.{layer}.self_attn"
        x = self._norm(hidden, f"model.layers.{layer}.input_layernorm")
        q, k, v = (
            linear(x, self.weights[f"{prefix}.{name}_proj.weight"]).unflatten(
                1, (-1, self.config.head_dim)
            )
            for name in "qkv"
        )
        if self.config.qk_norm:
            q, k = self._norm(q, f"{prefix}.q_norm"), self._norm(k, f"{prefix}.k_norm")
        q, k = rope(q, angles), rope(k, angles)
        outputs, row = [], 0
        for sequence in sequences:
            rows = slice(row, row + len(sequence.tokens))
            row = rows.stop
            table, start = sequence.block_table, sequence.start
            keys, values = cache.update(layer, table, start, k[rows], v[rows])
            outputs.append(attention(q[rows], keys, values))
        heads = torch.cat(outputs).flatten(1)
        return self.group.sum(linear(heads, self.weights[f"{prefix}.o_proj.weight"]))

    def _mlp(self, layer: int, hidden: Tensor) -> Tensor:
        prefix = f"model.layers.{layer}.mlp"
        x = self._norm(hidden, f"model.layers.{layer}.post_attention_layernorm")
        gate = linear(x, self.weights[f"{prefix}.gate_proj.weight"])
        up = linear(x, self.weights[f"{prefix}.up_proj.weight"])
        down = self.weights[f"{prefix}.down_proj.weight"]
        return self.group.sum(linear(swiglu(gate, up), down))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

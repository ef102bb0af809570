"""The decoder's layers in order, over a ragged batch: several sequences, each some tokens long."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .cache import Cache, NoCache, Place
from .config import Config
from .operators import (
    attention,
    causal_conv,
    experts,
    gated_delta_rule,
    gated_rms_norm,
    linear,
    log_decay,
    rms_norm,
    rope,
    rope_table,
    route,
    swiglu,
)


@dataclass
class Sequence:
    """The part of a request that one step computes: `tokens` at positions start, start + 1, …"""

    tokens: list[int]
    start: int
    place: Place


class Batch(NamedTuple):
    """Sequences one after another, the rows of each, and the angles [T, R/2] of all."""

    sequences: list[Sequence]
    rows: list[slice]
    angles: Tensor


class Output(NamedTuple):
    """Final hidden states [T, hidden]; experts that were chosen [layers, T, k]."""

    hidden: Tensor
    experts: Tensor


class Model:
    """Weights and formulas; no state of any request."""

    def __init__(self, config: Config, weights: dict[str, Tensor], max_context: int):
        self.config = config
        self.weights = weights
        self.angles = rope_table(max_context, config.rotary_dim, config.rope_theta)

    def forward(self, sequences: list[Sequence], cache: Cache | NoCache) -> Output:
        """Hidden states of the tokens of all sequences, one sequence after another."""
        batch = self._batch(sequences)
        tokens = [token for sequence in sequences for token in sequence.tokens]
        hidden, chosen = self.weights["model.embed_tokens.weight"][tokens], []
        for layer, kind in enumerate(self.config.layer_types):
            mixer = self._attention if kind == "full_attention" else self._delta_net
            x = self._norm(hidden, f"model.layers.{layer}.input_layernorm")
            hidden = hidden + mixer(layer, x, batch, cache)
            x = self._norm(hidden, f"model.layers.{layer}.post_attention_layernorm")
            mixed, ids = self._experts(layer, x)
            hidden = hidden + mixed + self._shared_expert(layer, x)
            chosen.append(ids)
        return Output(self._norm(hidden, "model.norm"), torch.stack(chosen))

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocab] of final hidden states [rows, hidden]."""
        tied = self.config.tie_word_embeddings
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return linear(hidden, self.weights[head]).float()

    def _batch(self, sequences: list[Sequence]) -> Batch:
        rows, end = [], 0
        for sequence in sequences:
            rows.append(slice(end, end + len(sequence.tokens)))
            end += len(sequence.tokens)
        positions = [s.start + i for s in sequences for i in range(len(s.tokens))]
        return Batch(sequences, rows, self.angles[positions])

    def _attention(self, layer: int, x: Tensor, batch: Batch, cache: Cache | NoCache) -> Tensor:
        config, prefix = self.config, f"model.layers.{layer}.self_attn"
        projected = self._linear(x, f"{prefix}.q_proj").unflatten(1, (-1, 2 * config.head_dim))
        q, gate = projected.chunk(2, dim=-1)
        k, v = (
            self._linear(x, f"{prefix}.{name}_proj").unflatten(1, (-1, config.head_dim))
            for name in "kv"
        )
        q = rope(self._norm(q, f"{prefix}.q_norm"), batch.angles)
        k = rope(self._norm(k, f"{prefix}.k_norm"), batch.angles)
        outputs = []
        for sequence, rows in zip(batch.sequences, batch.rows, strict=True):
            keys, values = cache.update(layer, sequence.place, sequence.start, k[rows], v[rows])
            outputs.append(attention(q[rows], keys, values))
        gated = torch.cat(outputs) * gate.sigmoid()
        return self._linear(gated.flatten(1), f"{prefix}.o_proj")

    def _delta_net(self, layer: int, x: Tensor, batch: Batch, cache: Cache | NoCache) -> Tensor:
        prefix = f"model.layers.{layer}.linear_attn"
        z = self._linear(x, f"{prefix}.in_proj_z")
        qkv = self._linear(x, f"{prefix}.in_proj_qkv")
        beta = self._linear(x, f"{prefix}.in_proj_b").sigmoid()
        a_log, dt_bias = self.weights[f"{prefix}.A_log"], self.weights[f"{prefix}.dt_bias"]
        g = log_decay(self._linear(x, f"{prefix}.in_proj_a"), a_log, dt_bias)
        outputs = []
        for sequence, rows in zip(batch.sequences, batch.rows, strict=True):
            tail, state = cache.state(layer, sequence.place)
            mixed, tail = causal_conv(
                qkv[rows], tail, self.weights[f"{prefix}.conv1d.weight"].squeeze(1)
            )
            output, state = gated_delta_rule(*self._heads(mixed), g[rows], beta[rows], state)
            cache.set_state(layer, sequence.place, (tail, state))
            outputs.append(output)
        y = torch.cat(outputs)
        norm = self.weights[f"{prefix}.norm.weight"]
        y = gated_rms_norm(y, z.view_as(y), norm, self.config.rms_norm_eps)
        return self._linear(y.flatten(1), f"{prefix}.out_proj")

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [T, G, Dk] and v [T, H, Dv] of [T, C]: queries, keys, values side by side."""
        config = self.config
        q, k, v = mixed.split([config.key_dim, config.key_dim, config.value_dim], dim=1)
        width = config.linear_key_head_dim
        return (
            q.unflatten(1, (-1, width)),
            k.unflatten(1, (-1, width)),
            v.unflatten(1, (-1, config.linear_value_head_dim)),
        )

    def _experts(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the routed experts add [T, hidden], and which they were [T, k]."""
        prefix = f"model.layers.{layer}.mlp"
        gate_up = self.weights[f"{prefix}.experts.gate_up_proj"]
        down = self.weights[f"{prefix}.experts.down_proj"]
        weights, ids = route(self._linear(x, f"{prefix}.gate"), self.config.num_experts_per_tok)
        return experts(x, weights, ids, gate_up, down), ids

    def _shared_expert(self, layer: int, x: Tensor) -> Tensor:
        prefix = f"model.layers.{layer}.mlp.shared_expert"
        gate, up = (self._linear(x, f"{prefix}.{name}_proj") for name in ("gate", "up"))
        output = self._linear(swiglu(gate, up), f"{prefix}.down_proj")
        return self._linear(x, f"{prefix}_gate").sigmoid() * output

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

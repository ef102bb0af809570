"""The hybrid decoder: the forward pass over the rows of a batch."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .batch import Batch, Group, merge
from .checkpoint import Checkpoint
from .config import Config
from .layers import Experts, FullMixer, Layer, LinearMixer, read_layer
from .operators import (
    attention,
    causal_conv,
    delta_rule_,
    experts,
    gated_rms_norm,
    linear,
    log_decay,
    rotate,
    route,
    scaled_norm,
    swiglu,
)


def rope_tables(config: Config, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, 1, R/2] in float32, of angles taken in float64."""
    even = torch.arange(0, config.rotary_dim, 2, dtype=torch.float64)
    frequency = config.rope_theta ** (-even / max(config.rotary_dim, 1))
    angles = torch.arange(positions, dtype=torch.float64)[:, None, None] * frequency
    return angles.cos().float(), angles.sin().float()


class Model:
    """Weights and forward pass. It holds nothing of any request."""

    def __init__(self, checkpoint: Checkpoint, config: Config, max_context: int) -> None:
        """Read all weights; `max_context` bounds the positions."""
        self.config = config
        self.layers = [read_layer(checkpoint, config, i) for i in range(config.num_hidden_layers)]
        self.embedding = checkpoint.text("embed_tokens.weight")
        self.norm = 1 + checkpoint.text("norm.weight")
        tied = config.tie_word_embeddings
        self.head = self.embedding if tied else checkpoint.take("lm_head.weight")
        self.cos, self.sin = rope_tables(config, max_context)

    def forward(self, batch: Batch, rows: list[int]) -> tuple[Tensor, list[Tensor]]:
        """Compute a batch and write the cache; each token may be fed once only.

        Returns the logits after the tokens of `rows` [len(rows), V] and, per layer, the experts of
        every token [tokens, k], likeliest first.
        """
        eps, chosen = self.config.rms_norm_eps, []
        rotation = self.cos[batch.positions], self.sin[batch.positions]
        h = self.embedding[batch.tokens]
        for layer in self.layers:
            h += self._mix(layer, scaled_norm(h, layer.input_norm, eps), batch, rotation)
            mixed, ids = self._experts(layer.experts, scaled_norm(h, layer.expert_norm, eps))
            h += mixed
            chosen.append(ids)
        batch.store()
        return linear(scaled_norm(h[rows], self.norm, eps), self.head), chosen

    def _mix(
        self, layer: Layer, x: Tensor, batch: Batch, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        """The layer's mixer on x [tokens, E]."""
        if isinstance(layer.mixer, LinearMixer):
            return self._linear_attention(layer.mixer, layer.index, x, batch.groups)
        return self._full_attention(layer.mixer, layer.index, x, batch, rotation)

    def _linear_attention(
        self, mixer: LinearMixer, index: int, x: Tensor, groups: list[Group]
    ) -> Tensor:
        """Gated DeltaNet; x [tokens, E]."""
        projected = linear(x, mixer.in_proj)
        mixed = merge([self._delta_net(mixer, index, projected[g.rows], g) for g in groups])
        return linear(mixed, mixer.out_proj)

    def _delta_net(
        self, mixer: LinearMixer, index: int, projected: Tensor, group: Group
    ) -> Tensor:
        """What lies between the two projections, for B sequences of T tokens; [B·T, H·Dv]."""
        c = self.config
        heads, width = c.linear_num_value_heads, c.linear_value_head_dim
        key_heads, key_width = c.linear_num_key_heads, c.linear_key_head_dim
        tail = group.tails[index]
        rows = projected.view(group.size, group.length, -1)
        u, z, b, a = rows.split((c.conv_dim, c.value_dim, heads, heads), dim=-1)
        convolved, new_tail = causal_conv(u, tail, mixer.conv)
        tail.copy_(new_tail)
        q, k, v = convolved.split((c.key_dim, c.key_dim, c.value_dim), dim=-1)
        q = q.unflatten(-1, (key_heads, key_width))
        k = k.unflatten(-1, (key_heads, key_width))
        v = v.unflatten(-1, (heads, width))
        g = log_decay(a, mixer.a_log, mixer.dt_bias)
        o = delta_rule_(q, k, v, g, b.sigmoid(), group.states[index])
        z = z.unflatten(-1, (heads, width))
        return gated_rms_norm(o, z, mixer.norm, c.rms_norm_eps).reshape(-1, c.value_dim)

    def _full_attention(
        self,
        mixer: FullMixer,
        index: int,
        x: Tensor,
        batch: Batch,
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Gated attention; x [tokens, E]."""
        c = self.config
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        projected = linear(x, mixer.in_proj).view(len(x), -1, dim)
        qk, v, gate = projected.split((heads + kv_heads, kv_heads, heads), dim=1)
        qk = F.rms_norm(qk, (dim,), None, c.rms_norm_eps) * mixer.norm
        q, k = rotate(qk, *rotation).split((heads, kv_heads), dim=1)
        mixed = self._attend(index, q, k, v, batch) * gate.sigmoid()
        return linear(mixed.reshape(len(x), -1), mixer.out_proj)

    def _attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Cache k and v [tokens, K, D] and attend, request by request; returns [tokens, N, D]."""
        mixed, row = [], 0
        for chunk in (chunk for group in batch.groups for chunk in group.chunks):
            rows = slice(row, row + len(chunk.tokens))
            row, end = rows.stop, chunk.start + len(chunk.tokens)
            # [positions, K, D], of the valid prefix alone: a slot may hold an old request's NaN.
            keys = batch.cache.keys[index, chunk.slot, :, :end].transpose(0, 1)
            values = batch.cache.values[index, chunk.slot, :, :end].transpose(0, 1)
            keys[chunk.start :] = k[rows]
            values[chunk.start :] = v[rows]
            mixed.append(attention(q[rows], keys, values))
        return merge(mixed)

    def _experts(self, weights: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
        """Routed and shared experts of x [tokens, E]; returns ([tokens, E], ids [tokens, k])."""
        c, shared = self.config, self.config.shared_expert_intermediate_size
        projected = linear(x, weights.in_proj)
        router, scalar, gate, up = projected.split((c.num_experts, 1, shared, shared), dim=-1)
        chances, ids = route(router, c.num_experts_per_tok)
        routed = experts(x, chances, ids, weights.gate_up, weights.down)
        always = linear(swiglu(gate, up) * scalar.sigmoid(), weights.shared_down)
        return routed + always, ids


def read_model(folder: Path, config: Config, max_context: int) -> Model:
    """The model in `folder`; no reference to its files is kept."""
    with Checkpoint(folder, config) as checkpoint:
        return Model(checkpoint, config, max_context)

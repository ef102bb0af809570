"""The hybrid decoder: embedding, layers of a mixer and experts each, head."""

import torch

from .batch import Batch, Group
from .cache import Cache
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
    route,
    swiglu,
)
from .weights import Experts, FullAttention, LinearAttention, Weights


class Model:
    """Weights and the arithmetic over them; what a sequence remembers is in the cache."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self._config = config
        self._weights = weights
        width = config.rotary_dim
        exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
        self._frequencies = config.rope_theta**-exponents  # [R/2]

    def forward(self, batch: Batch, cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed a batch of T tokens, once each -> hidden [T, E], expert ids [layers, T, k].

        Writes keys, values, tails and states of the batch's own slots. hidden is before the
        final norm.
        """
        eps = self._config.rms_norm_eps
        angles = batch.positions.unsqueeze(1) * self._frequencies
        hidden = self._weights.embed[batch.tokens]
        chosen = []
        full = recurrent = 0
        for layer in self._weights.layers:
            x = rms_norm(hidden, layer.input_norm, eps)
            if isinstance(layer.mixer, LinearAttention):
                tails, states = cache.tails[recurrent], cache.states[recurrent]
                hidden = hidden + self._linear_attention(layer.mixer, x, batch, tails, states)
                recurrent += 1
            else:
                keys, values = cache.keys[full], cache.values[full]
                mixed = self._full_attention(layer.mixer, x, angles, batch, keys, values)
                hidden = hidden + mixed
                full += 1
            x = rms_norm(hidden, layer.post_norm, eps)
            mixed, ids = self._experts(layer.experts, x)
            hidden = hidden + mixed
            chosen.append(ids)
        return hidden, torch.stack(chosen)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head: hidden [T, E] -> logits [T, V]."""
        normed = rms_norm(hidden, self._weights.norm, self._config.rms_norm_eps)
        return linear(normed, self._weights.head)

    def _linear_attention(
        self,
        weights: LinearAttention,
        x: torch.Tensor,
        batch: Batch,
        tails: torch.Tensor,
        states: torch.Tensor,
    ) -> torch.Tensor:
        """Gated DeltaNet: x [T, E] -> [T, E]; tails [slots, W-1, C], states [slots, H, Dk, Dv]."""
        config = self._config
        heads, width = config.linear_num_value_heads, config.linear_value_head_dim
        parts = (config.conv_width, config.value_width, heads, heads)
        u, z, b, a = linear(x, weights.in_proj).split(parts, dim=-1)
        g, beta = log_decay(a, weights.a_log, weights.dt_bias), b.sigmoid()
        out = torch.cat(
            [
                self._recur(group, u[rows], g[rows], beta[rows], weights.conv, tails, states)
                for group in batch.groups
                for rows in (group.rows,)
            ]
        )  # [T, H, Dv]
        gate = z.reshape(-1, heads, width)
        y = gated_rms_norm(out, weights.norm, config.rms_norm_eps, gate)
        return linear(y.flatten(1), weights.out_proj)

    def _recur(
        self,
        group: Group,
        u: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        conv: torch.Tensor,
        tails: torch.Tensor,
        states: torch.Tensor,
    ) -> torch.Tensor:
        """Convolution and delta rule of B chunks of T tokens: u [B*T, C] -> [B*T, H, Dv].

        The B sequences' heads stand side by side for the recurrence over T.
        """
        config, count = self._config, len(group.chunks)
        widths = (config.key_width, config.key_width, config.value_width)
        mixed, tails[group.slots] = causal_conv(
            u.view(count, group.length, -1), tails[group.slots], conv
        )
        q, k, v = mixed.transpose(0, 1).split(widths, dim=-1)  # [T, B, ..]
        key, value = config.linear_key_head_dim, config.linear_value_head_dim
        g, beta = (
            each.view(count, group.length, -1).transpose(0, 1).flatten(1) for each in (g, beta)
        )
        out, state = gated_delta_rule(
            q.reshape(group.length, -1, key),
            k.reshape(group.length, -1, key),
            v.reshape(group.length, -1, value),
            g,
            beta,
            states[group.slots].flatten(0, 1),
        )
        states[group.slots] = state.view(count, *states.shape[1:])
        out = out.view(group.length, count, -1, value).transpose(0, 1)
        return out.flatten(0, 1)

    def _full_attention(
        self,
        weights: FullAttention,
        x: torch.Tensor,
        angles: torch.Tensor,
        batch: Batch,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Gated attention: x [T, E] -> [T, E]; keys and values [slots, K, P, D]."""
        config = self._config
        heads, kv_heads, width = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )
        parts = [(heads + kv_heads) * width, kv_heads * width, heads * width]
        qk, v, gate = linear(x, weights.in_proj).split(parts, dim=-1)
        qk = rms_norm(qk.view(-1, heads + kv_heads, width), weights.qk_norm, config.rms_norm_eps)
        q, k = rope(qk, angles).split((heads, kv_heads), dim=1)
        v = v.view(-1, kv_heads, width)
        out = torch.cat([_attend(group, q, k, v, keys, values) for group in batch.groups])
        return linear(out.flatten(1) * gate.sigmoid(), weights.out_proj)

    def _experts(self, weights: Experts, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Routed experts and the shared one: x [T, E] -> [T, E], ids [T, k]."""
        config, shared = self._config, self._config.shared_expert_intermediate_size
        parts = (config.num_experts, 1, shared, shared)
        router, open_, gate, up = linear(x, weights.in_proj).split(parts, dim=-1)
        chances, ids = route(router, config.num_experts_per_tok)
        routed = experts(x, chances, ids, weights.gate_up, weights.down)
        always = linear(swiglu(gate, up), weights.shared_down)
        return routed + open_.sigmoid() * always, ids


def _attend(
    group: Group,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Write k, v [T, K, D] of each chunk into its slot and attend over its valid prefix alone."""
    out, first = [], group.rows.start
    for chunk in group.chunks:
        rows, end = slice(first, first + group.length), chunk.start + group.length
        past_keys = keys[chunk.slot, :, :end].transpose(0, 1)  # [P, K, D]
        past_values = values[chunk.slot, :, :end].transpose(0, 1)
        past_keys[chunk.start :] = k[rows]
        past_values[chunk.start :] = v[rows]
        out.append(attention(q[rows], past_keys, past_values))
        first += group.length
    return torch.cat(out)

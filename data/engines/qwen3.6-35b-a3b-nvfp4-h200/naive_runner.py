"""The whole model from the naive operators: what every device without kernels of its own runs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import naive, sampler
from .cache import Cache
from .config import Config
from .weights import Attention, Gdn, Weights


@dataclass
class Picked:
    """Tokens and log probabilities of one launch; `logits` are kept for rows with filters."""

    tokens: Tensor
    logprobs: Tensor

    def read(self) -> tuple[list[int], list[float]]:
        return self.tokens.tolist(), self.logprobs.tolist()


class NaiveRunner:
    """Runs segments of rows through all layers; state lives in the cache."""

    graph_replays = 0

    def __init__(self, config: Config, weights: Weights, cache: Cache, dtype: torch.dtype) -> None:
        self.config, self.weights, self.cache, self.dtype = config, weights, cache, dtype
        self.device = cache.states.device
        slots = cache.max_batch + 1
        self.token = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self.position = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self.temperature = torch.zeros(slots, device=self.device)
        self.seed = torch.zeros(slots, dtype=torch.int64, device=self.device)

    def forward(self, tokens: Tensor, segments: naive.Segments, routing: list | None = None):
        """Hidden states [R, H] after the final norm; expert ids are appended to `routing`."""
        w, c = self.weights, self.config
        x = w.embedding[tokens].to(self.dtype)
        counts = {Gdn: 0, Attention: 0}
        for layer in w.layers:
            kind = type(layer.mixer)
            normed = naive.rms_norm(x, layer.input_norm, c.rms_eps)
            x = x + self._mixers[kind](self, layer.mixer, counts[kind], normed, segments)
            counts[kind] += 1
            x = x + self._moe(layer, x, routing)
        return naive.rms_norm(x, w.final_norm, c.rms_eps)

    def _gdn(self, mixer: Gdn, index: int, normed: Tensor, segments: naive.Segments) -> Tensor:
        c = self.config
        qkv, z = naive.linear(normed, mixer.in_proj).split((c.conv_width, c.value_width), -1)
        ab = naive.linear(normed, mixer.ab)[:, : 2 * c.value_heads]
        gates = (mixer.conv, mixer.a_log, mixer.dt_bias)
        ring, states = self.cache.rings[index], self.cache.states[index]
        o = naive.gdn_mixer(qkv, ab, *gates, ring, states, segments, c)
        return naive.linear(naive.gated_norm(o, z, mixer.norm, c.rms_eps, c.value_dim), mixer.out)

    def _attention(self, mixer: Attention, index: int, normed: Tensor, segments: naive.Segments):
        qkv = naive.linear(normed, mixer.qkv)
        norms = (mixer.q_norm, mixer.k_norm)
        pages, table = self.cache.pages[index], self.cache.page_table
        o = naive.attention(qkv, *norms, pages, table, segments, self.config)
        return naive.linear(o, mixer.out)

    _mixers = {Gdn: _gdn, Attention: _attention}  # noqa: RUF012

    def _moe(self, layer, x: Tensor, routing: list | None) -> Tensor:
        c, moe = self.config, layer.moe
        normed = naive.rms_norm(x, layer.post_norm, c.rms_eps)
        logits = naive.linear(normed, moe.router)[:, : c.experts + 1]
        if routing is not None:
            routing.append(naive.top_experts(logits[:, :-1], c.top_k)[0])
        gate_up = naive.deinterleave(moe.shared_gate_up.dense(x.dtype))
        shared = naive.swiglu(normed, gate_up)
        experts = (moe.gate_up, moe.down, shared, moe.shared_down)
        return naive.moe(normed, logits, *experts, c.top_k)

    def head(self, hidden: Tensor) -> Tensor:
        """Float32 logits [R, V] of normed hidden states."""
        return naive.linear(hidden, self.weights.head).float()

    def start(self, slot: int, temperature: float, seed: int) -> None:
        """Set a slot's sampling state before its prefill."""
        self.temperature[slot], self.seed[slot], self.position[slot] = temperature, seed, 0

    def prefill(self, slot: int, start: int, tokens: list[int], last: bool) -> Tensor | None:
        """Run prompt tokens that begin at `start`; logits [1, V] of the last row if `last`."""
        ids = torch.tensor(tokens, device=self.device)
        hidden = self.forward(ids, [(slot, start, len(tokens))])
        self.position[slot] = start + len(tokens)
        return self.head(hidden[-1:]) if last else None

    def decode(self, slots: list[int]) -> Tensor:
        """One step of the given slots: logits [len(slots), V]; positions advance."""
        index = torch.tensor(slots, device=self.device)
        segments = [(slot, int(self.position[slot]), 1) for slot in slots]
        logits = self.head(self.forward(self.token[index], segments))
        self.position[index] += 1
        return logits

    def pick(self, slots: list[int], logits: Tensor, filtered: Tensor | None = None) -> Picked:
        """Choose the next token of each slot from `filtered` (or `logits`) and remember it."""
        index = torch.tensor(slots, device=self.device)
        state = (self.temperature[index], self.seed[index], self.position[index])
        tokens = sampler.pick(logits if filtered is None else filtered, *state)
        self.token[index] = tokens
        return Picked(tokens, naive.log_softmax_at(logits, tokens))

    def close(self) -> None:
        """Nothing outlives the object."""

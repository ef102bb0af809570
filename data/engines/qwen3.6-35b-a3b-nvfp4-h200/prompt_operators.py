"""The kernels of prompts beside their naive forms, by what they make together: PROMPT_OPERATORS."""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import buffers, naive
from .cache import Cache
from .config import Config
from .operators import Operator, Outputs
from .prefill import Prefill
from .weights import Attention, Gdn, Weights

SLOT = 1


class PromptBench:
    """Rows of a prompt, from a seed: of a new sequence, or of one that goes on after `context`."""

    def __init__(
        self, config: Config, weights: Weights, rows: int, context: int, seed: int, kernels=None
    ) -> None:
        if config.hidden % 256 or config.value_width % 256:
            raise NotImplementedError("widths: the kernels' are multiples of 256")
        device = weights.final_norm.device
        self.config, self.weights, self.rows = config, weights, rows
        self.start = context if seed % 2 else 0
        self.random = torch.Generator(device).manual_seed(seed)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.cache = Cache(config, device, dtype, 2, self.start + rows, None)
        pages = torch.arange(1, self.cache.pages_total + 1, device=device).int().flip(0)
        self.cache.page_table[:2] = pages.view(2, -1)
        for tensor, scale in ((self.cache.states, 0.2), (self.cache.rings, 0.7)):
            tensor.copy_(self.normal(*tensor.shape) * scale)
        self.cache.pages.copy_(self.normal(*self.cache.pages.shape) * 0.5)
        self.where = torch.tensor([SLOT, self.start, rows], device=device)
        rope = buffers.rope_table(config, buffers.context_positions(self.cache), device)
        sms = torch.cuda.get_device_properties(device).multi_processor_count if kernels else 132
        self.prefill = Prefill(config, weights, self.cache, kernels, rope, sms)
        self.x, self.xn = self.normal(rows, config.hidden), self.normal(rows, config.hidden).half()
        self.y: dict[type, Tensor] = {}
        for kind in (Gdn, Attention):
            alpha = self.dense(kind)["in"].alpha
            self.y[kind] = 0.7 * self.normal(rows, len(alpha)) / alpha

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, device=self.weights.final_norm.device)

    def index(self, kind: type) -> int:
        return next(
            i for i, layer in enumerate(self.weights.layers) if isinstance(layer.mixer, kind)
        )

    def dense(self, kind: type) -> dict:
        return self.prefill.dense[self.index(kind)]

    def mixer(self, kind: type):
        return self.weights.layers[self.index(kind)].mixer

    def projected(self, kind: type, dtype: torch.dtype) -> Tensor:
        return self.y[kind].to(dtype) * self.dense(kind)["in"].alpha.to(dtype)

    def mix(self, kind: type) -> Tensor:
        """The kernels of a mixer, on the first layer of its kind."""
        run = self.prefill.delta if kind is Gdn else self.prefill.attention
        alpha = self.dense(kind)["in"].alpha
        return run(self.mixer(kind), self.y[kind], alpha, 0, self.where, self.start)

    @property
    def segments(self) -> list[tuple[int, int, int]]:
        return [(SLOT, self.start, self.rows)]


@dataclass(frozen=True)
class PromptOperator(Operator):
    inputs: type = PromptBench
    rows: range = range(1, 1025)


def _delta(b: PromptBench, dtype: torch.dtype) -> Outputs:
    c, mixer, y = b.config, b.mixer(Gdn), b.projected(Gdn, dtype)
    ring, states = b.cache.rings[0].to(dtype), b.cache.states[0].to(dtype)
    gates = (mixer.conv.to(dtype), mixer.a_log.to(dtype), mixer.dt_bias.to(dtype))
    widths = (c.conv_width, c.value_width, 2 * c.value_heads)
    qkv, z, ab = y[:, : sum(widths)].split(widths, 1)
    o = naive.gdn_mixer(qkv, ab, *gates, ring, states, b.segments, c)
    gated = naive.gated_norm(o, z, mixer.norm, c.rms_eps, c.value_dim)
    return {"gated": gated, "states": states, "rings": ring}


def _delta_kernels(b: PromptBench) -> Outputs:
    gated = b.mix(Gdn)
    return {"gated": gated, "states": b.cache.states[0], "rings": b.cache.rings[0]}


def _attention(b: PromptBench, dtype: torch.dtype) -> Outputs:
    mixer, pages = b.mixer(Attention), b.cache.pages[0].to(dtype)
    y = b.projected(Attention, dtype)
    norms = (mixer.q_norm, mixer.k_norm)
    out = naive.attention(y, *norms, pages, b.cache.page_table, b.segments, b.config)
    return {"out": out, "pages": pages}


def _attention_kernels(b: PromptBench) -> Outputs:
    out = b.mix(Attention)
    return {"out": out, "pages": b.cache.pages[0]}


def _experts(b: PromptBench, dtype: torch.dtype) -> Outputs:
    moe, c, xn = b.weights.layers[0].moe, b.config, b.xn.to(dtype)
    logits = naive.linear(xn, moe.router)[:, : c.experts + 1]
    shared = naive.swiglu(xn, naive.deinterleave(moe.shared_gate_up.dense(dtype)))
    mixed = naive.moe(xn, logits, moe.gate_up, moe.down, shared, moe.shared_down, c.top_k)
    x = b.x.to(dtype) + mixed
    return {"x": x, "xn": naive.rms_norm(x, b.weights.final_norm, c.rms_eps)}


def _experts_kernels(b: PromptBench) -> Outputs:
    x, layer = b.x.clone(), b.weights.layers[0]
    xn = b.prefill.experts(layer, b.prefill.dense[0], x, b.xn, b.weights.final_norm, None)
    return {"x": x, "xn": xn}


PROMPT_OPERATORS: dict[str, Operator] = {
    "prompt_delta": PromptOperator(_delta, _delta_kernels),
    "prompt_attention": PromptOperator(_attention, _attention_kernels),
    "prompt_experts": PromptOperator(_experts, _experts_kernels),
}

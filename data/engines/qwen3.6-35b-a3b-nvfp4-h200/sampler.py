"""From logits to a token: filters in torch, and the pick that both devices do alike.

A temperature sample is the argmax of logits / temperature + Gumbel noise, the noise being a hash
of (seed, position, token id): no state, the same for every batch it is computed in.
"""

import torch
from torch import Tensor

from .params import Params

MASK32 = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """The 32-bit finaliser of MurmurHash3 on int64 tensors that hold unsigned 32-bit values."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & MASK32
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & MASK32
    return x ^ (x >> 16)


def gumbel(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Gumbel noise [R, vocab] float32 for seeds and positions [R] (int64)."""
    base = mix(mix(seed & MASK32) ^ ((seed >> 32) & MASK32) ^ ((position * 0x9E3779B1) & MASK32))
    ids = torch.arange(vocab, device=seed.device, dtype=torch.int64)
    return -torch.log(-torch.log(uniform(mix(base[:, None] ^ mix(ids)[None]))))


def uniform(bits: Tensor) -> Tensor:
    """Float32 strictly between 0 and 1 of 32 bits; of 24 of them the largest would round to 1."""
    return ((bits >> 9).float() + 0.5) * 2.0**-23


def pick(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Token ids [R]: argmax at temperature 0 (lowest id among equals), else a Gumbel sample."""
    scaled = logits / temperature.clamp_min(1e-6)[:, None]
    noisy = scaled + gumbel(seed, position, logits.shape[1])
    return torch.where(temperature > 0, first_max(noisy), first_max(logits))


def first_max(x: Tensor) -> Tensor:
    """Lowest index of the maximum of each row."""
    top = x == x.amax(-1, keepdim=True)
    return top.to(torch.int8).argmax(-1)


class History:
    """Token counts of one request on the device, for penalties."""

    def __init__(self, prompt: Tensor, vocab: int) -> None:
        self.seen = torch.zeros(vocab, dtype=torch.bool, device=prompt.device)
        self.seen[prompt] = True
        self.output = torch.zeros(vocab, dtype=torch.float32, device=prompt.device)

    def add(self, token: Tensor) -> None:
        self.seen[token] = True
        self.output[token] += 1


def adjust(
    logits: Tensor, params: Params, history: History | None, stops: tuple[int, ...], generated: int
) -> Tensor:
    """Logits [V] after penalties, bias and filters; removed tokens are -inf."""
    x = logits.clone()
    if history is not None:
        scaled = torch.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty)
        x = torch.where(history.seen, scaled, x)
        x = x - params.frequency_penalty * history.output
        x = x - params.presence_penalty * (history.output > 0)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if generated < params.min_tokens and stops:
        x[list(stops)] = float("-inf")
    return _filter(x, params) if params.temperature > 0 else x


def _filter(x: Tensor, params: Params) -> Tensor:
    """Keep the most probable tokens that top-k, top-p and min-p all allow, at least one."""
    if not (params.top_k or params.top_p < 1 or params.min_p):
        return x
    values, order = (x / params.temperature).sort(descending=True, stable=True)
    probability = values.softmax(-1)
    keep = torch.ones_like(values, dtype=torch.bool)
    if params.top_k:
        keep[params.top_k :] = False
    if params.top_p < 1:
        kept = probability * keep
        before = kept.cumsum(-1) - kept
        keep &= before < params.top_p * kept.sum()
    keep &= probability >= params.min_p * probability[0]
    keep[0] = True
    return x.masked_fill(~torch.zeros_like(keep).scatter(0, order, keep), float("-inf"))

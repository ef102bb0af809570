"""Operators of the known families in numpy's float64, and inputs to try an engine's own on.

An engine that calls one of its pairs by a name of KNOWN, with these arguments, is judged by these
formulas too. T: tokens, P: positions, N and K: query and key heads, D: head_dim, C: channels,
G and H: key and value heads of Gated DeltaNet, E: experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]


class Known(NamedTuple):
    """formula(**arrays, **scalars): the results; inputs(draw): both; wide: arrays that an engine
    keeps in float32 at least, exact: in float64."""

    formula: Callable[..., tuple[np.ndarray, ...]]
    inputs: Callable[[Draw], tuple[Arrays, dict[str, Any]]]
    wide: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()


class Draw:
    """Normal numbers and sizes for one case: `rows` tokens after `context` others."""

    def __init__(
        self, rng: np.random.Generator, rows: int, context: int, granules: Mapping[str, int]
    ):
        self.rng, self.rows, self.context, self.granules = rng, rows, context, granules

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return scale * self.rng.standard_normal(shape)

    def size(self, name: str, low: int, high: int, of: int = 1) -> int:
        """A multiple of the granule that engine.json names."""
        granule = int(np.lcm(self.granules.get(name, 1), of))
        return granule * int(self.rng.integers(-(-low // granule), max(low, high) // granule + 2))

    def heads(self) -> tuple[int, int, int]:
        """Query heads, key heads, head_dim."""
        keys = int(self.rng.integers(1, 3))
        return keys * int(self.rng.integers(1, 4)), keys, self.size("head_dim", 8, 72, of=2)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> tuple[np.ndarray]:
    """weight · x / sqrt(mean(x²) + eps) (Zhang and Sennrich 2019)."""
    return (x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * weight,)


def centred_rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> tuple[np.ndarray]:
    """The same with 1 + weight, as Qwen3.5 and later store it."""
    return rms_norm(x, 1 + weight, eps)


def gated_rms_norm(
    x: np.ndarray, gate: np.ndarray, weight: np.ndarray, eps: float
) -> tuple[np.ndarray]:
    """rms_norm(x) · silu(gate)."""
    return (rms_norm(x, weight, eps)[0] * silu(gate),)


def rope(x: np.ndarray, angles: np.ndarray) -> tuple[np.ndarray]:
    """Pairs (i, i + R/2) of x [T, heads, D] turned by angles [T, R/2]; the rest of D stays."""
    half = angles.shape[1]
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angles)[:, None]
    return (np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1),)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray]:
    """The last T of P positions over all before them: q [T, N, D], k and v [P, K, D]."""
    out = np.empty_like(q)
    group, before = q.shape[1] // k.shape[1], k.shape[0] - q.shape[0]
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(q.shape[2])
        hidden = np.arange(k.shape[0]) > before + np.arange(q.shape[0])[:, None]
        weights = np.exp(np.where(hidden, -np.inf, scores) - scores.max(-1, keepdims=True))
        out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, head // group]
    return (out,)


def swiglu(gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray]:
    """silu(gate) · up (Shazeer 2020)."""
    return (silu(gate) * up,)


def linear(x: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray]:
    """x weight^T: [T, in] by [out, in]."""
    return (x @ weight.T,)


def causal_conv(
    x: np.ndarray, tail: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """silu of a convolution of x [T, C] along time, weight [C, width], after tail [width-1, C]."""
    width, history = weight.shape[1], np.concatenate([tail, x])
    mixed = sum(weight[:, i] * history[i : i + len(x)] for i in range(width))
    return silu(mixed), history[len(x) :]


def log_decay(a: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray) -> tuple[np.ndarray]:
    """-exp(A_log) · softplus(a + dt_bias), a [T, H]."""
    return (-np.exp(a_log) * np.logaddexp(0, a + dt_bias),)


def gated_delta_rule(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """S ← exp(g) S (I - beta k k^T) + beta k v^T, o = S^T q, token by token (arXiv 2412.06464).

    q, k [T, G, Dk] are made unit vectors (1e-6 below the squared length), q divided by sqrt(Dk);
    v [T, H, Dv], g and beta [T, H], state [H, Dk, Dv]; head h reads key head h // (H / G).
    """
    q, k = (x / np.sqrt(np.square(x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    out, state = np.empty_like(v), state.copy()
    group = v.shape[1] // k.shape[1]
    for t in range(len(v)):
        for head in range(v.shape[1]):
            key, query = k[t, head // group], q[t, head // group] / np.sqrt(q.shape[2])
            state[head] *= np.exp(g[t, head])
            state[head] += np.outer(key, beta[t, head] * (v[t, head] - key @ state[head]))
            out[t, head] = query @ state[head]
    return out, state


def route(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Softmax weights [T, k] of the k largest logits, renormalised, and their ids [T, k]."""
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    chosen = np.exp(np.take_along_axis(logits, ids, -1) - logits.max(-1, keepdims=True))
    return chosen / chosen.sum(-1, keepdims=True), ids


def experts(
    x: np.ndarray, weights: np.ndarray, ids: np.ndarray, gate_up: np.ndarray, down: np.ndarray
) -> tuple[np.ndarray]:
    """Σ over a token's experts of weight · down swiglu(gate x, up x); gate_up [E, 2 ffn, C]."""
    out = np.zeros_like(x)
    for t in range(len(x)):
        for weight, expert in zip(weights[t], ids[t], strict=True):
            gate, up = np.split(gate_up[expert] @ x[t], 2)
            out[t] += weight * (down[expert] @ (silu(gate) * up))
    return (out,)


def dequantise_nvfp4(
    packed: np.ndarray, block_scale: np.ndarray, global_scale: np.ndarray, dtype: str
) -> tuple[np.ndarray]:
    """E2M1 · E4M3 · float32: packed [N, K/2], the even code in the low nibble; one E4M3 scale, as
    its byte, for 16 weights of a row; exact in float64 (OCP Microscaling Formats 1.0)."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1, 1)
    exponent, mantissa = (block_scale >> 3 & 15).astype(int), block_scale & 7
    small = exponent == 0
    scales = np.ldexp(np.where(small, 0, 8) + mantissa, np.where(small, -9, exponent - 10))
    return (values * np.repeat(scales, 16, axis=1) * global_scale,)


def silu(x: np.ndarray) -> np.ndarray:
    """x · sigmoid(x)."""
    return x / (1 + np.exp(-x))


def _norm_inputs(d: Draw) -> tuple[Arrays, dict[str, Any]]:
    width = d.size("hidden_size", 30, 700)
    # small and shifted rows: epsilon counts, and the mean is not zero
    x = d.normal(d.rows, width, scale=0.1) + 0.05
    return {"x": x, "weight": 1 + d.normal(width, scale=0.3)}, {"eps": 1e-3}


def _gated_norm_inputs(d: Draw) -> tuple[Arrays, dict[str, Any]]:
    arrays, scalars = _norm_inputs(d)
    return arrays | {"gate": d.normal(*arrays["x"].shape)}, scalars


def _rope_inputs(d: Draw) -> tuple[Arrays, dict[str, Any]]:
    heads, _, width = d.heads()
    angles = d.rng.uniform(0, 3000, (d.rows, width // 2))
    return {"x": d.normal(d.rows, heads, width), "angles": angles}, {}


def _attention_inputs(d: Draw) -> tuple[Arrays, dict[str, Any]]:
    heads, keys, width = d.heads()
    cached = (d.rows + d.context, keys, width)
    q = d.normal(d.rows, heads, width, scale=1.5)
    return {"q": q, "k": d.normal(*cached), "v": d.normal(*cached) + 0.1}, {}


def _swiglu_inputs(d: Draw) -> tuple[Arrays, dict[str, Any]]:
    shape = d.rows, d.size("intermediate_size", 30, 700)
    return {"gate": d.normal(*shape, scale=2), "up": d.normal(*shape)}, {}


def _linear_inputs(d: Draw) -> tuple[Arrays, dict[str, Any]]:
    width, out = d.size("hidden_size", 30, 400), d.size("intermediate_size", 30, 400)
    return {"x": d.normal(d.rows, width), "weight": d.normal(out, width, scale=width**-0.5)}, {}


def _conv_inputs(d: Draw) -> tuple[Arrays, dict[str, Any]]:
    channels, width = int(d.rng.integers(8, 80)), 4
    arrays = {"x": d.normal(d.rows, channels), "tail": d.normal(width - 1, channels)}
    return arrays | {"weight": d.normal(channels, width, scale=0.6)}, {}


def _decay_inputs(d: Draw) -> tuple[Arrays, dict[str, Any]]:
    heads = int(d.rng.integers(2, 20))
    rates = {"a_log": d.normal(heads), "dt_bias": d.normal(heads, scale=0.5)}
    return {"a": d.normal(d.rows, heads, scale=3)} | rates, {}


def _delta_inputs(d: Draw) -> tuple[Arrays, dict[str, Any]]:
    keys, dk = int(d.rng.integers(1, 4)), d.size("linear_key_head_dim", 8, 24)
    values, dv = keys * int(d.rng.integers(1, 4)), d.size("linear_value_head_dim", 8, 24)
    arrays = {"q": d.normal(d.rows, keys, dk), "k": d.normal(d.rows, keys, dk)}
    arrays |= {"v": d.normal(d.rows, values, dv), "g": -np.exp(d.normal(d.rows, values) - 2)}
    beta = 1 / (1 + np.exp(-d.normal(d.rows, values)))
    return arrays | {"beta": beta, "state": d.normal(values, dk, dv)}, {}


def _route_inputs(d: Draw) -> tuple[Arrays, dict[str, Any]]:
    count = int(d.rng.integers(6, 40))
    logits = np.round(d.normal(d.rows, count, scale=8)) / 4  # equal ones are common
    return {"logits": logits}, {"k": int(d.rng.integers(1, 6))}


def _expert_inputs(d: Draw) -> tuple[Arrays, dict[str, Any]]:
    logits, width = d.normal(d.rows, 10), d.size("hidden_size", 20, 60)
    ffn = d.size("moe_intermediate_size", 10, 40)
    weights, ids = route(logits, 3)
    arrays = {"x": d.normal(d.rows, width), "weights": weights, "ids": ids}
    arrays["gate_up"] = d.normal(10, 2 * ffn, width, scale=width**-0.5)
    return arrays | {"down": d.normal(10, width, ffn, scale=ffn**-0.5)}, {}


def _nvfp4_inputs(d: Draw) -> tuple[Arrays, dict[str, Any]]:
    blocks, rows = int(d.rng.integers(1, 9)), d.rows
    arrays = {"packed": d.rng.integers(0, 256, (rows, 8 * blocks)).astype(np.uint8)}
    arrays["block_scale"] = d.rng.integers(0, 127, (rows, blocks)).astype(np.uint8)
    return arrays | {"global_scale": np.array(d.rng.uniform(1e-4, 1e-2), np.float32)}, {
        "dtype": "float64"
    }


KNOWN: dict[str, Known] = {
    "rms_norm": Known(rms_norm, _norm_inputs),
    "gated_rms_norm": Known(gated_rms_norm, _gated_norm_inputs),
    "rope": Known(rope, _rope_inputs, exact=("angles",)),
    "attention": Known(attention, _attention_inputs),
    "swiglu": Known(swiglu, _swiglu_inputs),
    "linear": Known(linear, _linear_inputs),
    "causal_conv": Known(causal_conv, _conv_inputs),
    "log_decay": Known(log_decay, _decay_inputs, wide=("a_log", "dt_bias")),
    "gated_delta_rule": Known(gated_delta_rule, _delta_inputs, wide=("g", "beta", "state")),
    "route": Known(route, _route_inputs, wide=("logits",)),
    "experts": Known(experts, _expert_inputs, wide=("weights",)),
    "dequantise_nvfp4": Known(dequantise_nvfp4, _nvfp4_inputs),
}


def known(family: str) -> dict[str, Known]:
    """The formulas of a family."""
    if family != "qwen3_5_moe":
        return KNOWN
    return KNOWN | {"rms_norm": Known(centred_rms_norm, _norm_inputs)}

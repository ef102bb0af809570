"""Every kernel of a decode step beside its naive form: OPERATORS maps a kernel's name to the pair.

A Workbench holds random activations, states and caches around a model. `kernel` launches the one
kernel on it and returns what it wrote; `naive` computes the same, in the dtype asked for, from what
the kernel read: so `naive` comes first.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import arguments, buffers, naive, sampler, single, steps
from .cache import Cache
from .config import Config
from .weights import Attention, Gdn, Weights

Outputs = dict[str, Tensor]


class Workbench:
    """Inputs of all operators for a number of rows, drawn from a seed."""

    def __init__(
        self, config: Config, weights: Weights, rows: int, context: int, seed: int, kernels=None
    ) -> None:
        widths = {config.hidden, config.value_width, config.attention_width}
        if config.value_width != config.attention_width or any(w % 256 for w in widths):
            raise NotImplementedError(f"widths {widths}: the kernels' are multiples of 256")
        device = weights.final_norm.device
        self.config, self.weights, self.rows, self.kernels = config, weights, rows, kernels
        self.random = torch.Generator(device).manual_seed(seed)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.cache = Cache(config, device, dtype, buffers.MAX_ROWS, context, None)
        self.buffers = buffers.Buffers(config, device)
        slots = buffers.MAX_ROWS + 1
        make = lambda dtype: torch.zeros(slots, dtype=dtype, device=device)  # noqa: E731
        self.slots = buffers.SlotState(
            make(torch.int64), make(torch.int64), make(torch.float32), make(torch.int64)
        )
        self._fill(context)
        kind = single.SingleStep if rows == 1 else steps.BatchedStep
        rope = buffers.rope_table(config, buffers.context_positions(self.cache), device)
        sms = torch.cuda.get_device_properties(device).multi_processor_count if kernels else 132
        self.step = kind(config, weights, self.cache, self.buffers, self.slots, rope, rows, sms)

    def _normal(self, tensor: Tensor, scale: float) -> None:
        draw = torch.randn(tensor.shape, generator=self.random, device=tensor.device)
        tensor.copy_(draw * scale)

    def _fill(self, context: int) -> None:
        b, cache, device = self.buffers, self.cache, self.buffers.x.device
        for tensor in (b.x, b.xn, b.y, b.ab, b.o, b.mixed, b.router, b.sums, b.parts):
            self._normal(tensor, 0.7)
        self._normal(b.h, 0.02)
        self._normal(b.logits, 3.0)
        self._normal(cache.states, 0.2)
        self._normal(cache.rings, 0.7)
        self._normal(cache.pages, 0.5)
        draw = lambda low, high: torch.randint(  # noqa: E731
            low, high, (self.rows,), generator=self.random, device=device
        )
        b.row_slot[: self.rows] = torch.arange(self.rows, device=device).int()
        self.slots.token[: self.rows] = draw(0, self.config.vocab)
        self.slots.seed[: self.rows] = draw(0, 2**40)
        self.slots.temperature[: self.rows] = draw(0, 2).float() * 0.8  # greedy or sampled
        self.slots.position[: self.rows] = draw(1, context - 1)  # a decode step never begins one
        pages = torch.arange(1, cache.pages_total + 1, device=device).int()
        cache.page_table[: buffers.MAX_ROWS] = pages.view(buffers.MAX_ROWS, -1)
        self.ids, self.gates = naive.top_experts(
            b.router[: self.rows, : self.config.experts], self.config.top_k
        )

    def launch(self, name: str, reads: str | None = None) -> None:
        """Run the first launch of that name (that reads a given argument) and wait for it."""
        launch = next(
            item
            for item in self.step.launches
            if item.kernel == name and (reads is None or getattr(item.args, reads))
        )
        self.kernels[launch.kernel].launch(launch.grid, launch.block, launch.args, launch.shared)
        torch.cuda.synchronize()

    def launch_single(self, *names: str) -> None:
        """Run instructions of the resident kernel on the plain buffers and wait for it."""
        launch, tag = self.step.single(*names)
        self.step.stage(tag)
        self.kernels[launch.kernel].launch(launch.grid, launch.block, launch.args, launch.shared)
        self.step.unstage(names[-1])
        torch.cuda.synchronize()

    def columns(self, blocks: Tensor) -> Tensor:
        """Rows of an activation buffer, [rows, K]: padded blocks, or plain for a single row."""
        if self.rows == 1:
            return blocks.flatten()[None, : blocks.shape[0] * buffers.X_COLUMNS]
        return blocks[:, : self.rows, : buffers.X_COLUMNS].transpose(0, 1).flatten(1)

    def layer(self, kind: type):
        return next(layer for layer in self.weights.layers if isinstance(layer.mixer, kind))

    @property
    def segments(self) -> list[tuple[int, int, int]]:
        return [(row, int(self.slots.position[row]), 1) for row in range(self.rows)]


@dataclass(frozen=True)
class Operator:
    """`inputs(config, weights, rows, context, seed, kernels)` makes the bench of both others, for
    one of the counts in `rows`; nothing but the results is `mutated`."""

    naive: Callable[[Workbench, torch.dtype], Outputs]
    kernel: Callable[[Workbench], Outputs]
    inputs: Callable[..., Workbench] = Workbench
    rows: range = range(1, buffers.MAX_ROWS + 1)
    mutated: tuple[str, ...] = ()

    def draw(self, engine, rows: int, context: int, seed: int) -> tuple[Workbench, torch.dtype]:
        """A bench around the weights of a loaded engine."""
        runner, kernels = engine.runner, getattr(engine.runner, "kernels", None)
        context = max(context + 1, 3)  # a decode step never begins one
        bench = self.inputs(engine.config, runner.weights, rows, context, seed, kernels)
        return bench, torch.float32


def _normed(w: Workbench, dtype: torch.dtype, norm: Tensor) -> Tensor:
    """The input of a projection: a norm of the residual stream, or rows that are normed already."""
    if w.rows > 1:
        return w.columns(w.buffers.xn).to(dtype)
    return naive.rms_norm(w.buffers.x[:1].to(dtype), norm, w.config.rms_eps)


def _first(w: Workbench):
    """The layer that the first projection of a step belongs to."""
    return w.weights.layers[0]


def _projection(w: Workbench, dtype: torch.dtype, layer) -> Outputs:
    x = _normed(w, dtype, layer.input_norm)
    mixer = layer.mixer
    if not isinstance(mixer, Gdn):
        return {"y": naive.linear(x, mixer.qkv)}
    return {"y": naive.linear(x, mixer.in_proj), "ab": naive.linear(x, mixer.ab)}


def _projected(w: Workbench, layer) -> Outputs:
    b, mixer = w.buffers, layer.mixer
    if not isinstance(mixer, Gdn):
        return {"y": b.y[: w.rows, : mixer.qkv.rows]}
    return {"y": b.y[: w.rows, : mixer.in_proj.rows], "ab": b.ab[: w.rows]}


def _delta(w: Workbench, dtype: torch.dtype) -> Outputs:
    b, c, mixer = w.buffers, w.config, w.layer(Gdn).mixer
    ring, states = w.cache.rings[0].to(dtype), w.cache.states[0].to(dtype)
    y = b.y[: w.rows].to(dtype)
    gates = (mixer.conv.to(dtype), mixer.a_log.to(dtype), mixer.dt_bias.to(dtype))
    qkv, z = y[:, : c.conv_width], y[:, c.conv_width : c.conv_width + c.value_width]
    ab = b.ab[: w.rows, : 2 * c.value_heads].to(dtype)
    o = naive.gdn_mixer(qkv, ab, *gates, ring, states, w.segments, c)
    if w.rows > 1:
        o = naive.gated_norm(o, z, mixer.norm, c.rms_eps, c.value_dim)
    return {"o": o, "states": states[: w.rows], "rings": ring[: w.rows]}


def _delta_wrote(w: Workbench) -> Outputs:
    o = w.buffers.o if w.rows == 1 else w.columns(w.buffers.mixed)
    return {"o": o, "states": w.cache.states[0, : w.rows], "rings": w.cache.rings[0, : w.rows]}


def _output(w: Workbench, dtype: torch.dtype, kernel: str) -> Outputs:
    b, c = w.buffers, w.config
    layer = w.weights.layers[0] if kernel != "single_out_raw" else w.layer(Attention)
    x = w.columns(b.mixed).to(dtype)
    if kernel == "single_out_gated":
        z = b.y[:1, c.conv_width : c.conv_width + c.value_width].to(dtype)
        x = naive.gated_norm(b.o.to(dtype), z, layer.mixer.norm, c.rms_eps, c.value_dim)
    y = naive.linear(x, layer.mixer.out)
    return {"x": b.x[:1].to(dtype) + y} if w.rows == 1 else {"sums": y}


def _output_wrote(w: Workbench) -> Outputs:
    b = w.buffers
    return {"x": b.x[:1]} if w.rows == 1 else {"sums": b.sums[:, : w.rows].sum(0)}


def _attention(w: Workbench, dtype: torch.dtype) -> Outputs:
    b, mixer, pages = w.buffers, w.layer(Attention).mixer, w.cache.pages[0].to(dtype)
    qkv, norms = b.y[: w.rows, : mixer.qkv.rows].to(dtype), (mixer.q_norm, mixer.k_norm)
    out = naive.attention(qkv, *norms, pages, w.cache.page_table, w.segments, w.config)
    return {"out": out, "pages": pages}


def _router(w: Workbench, dtype: torch.dtype) -> Outputs:
    layer, used = _first(w), w.config.experts + 1
    x = _normed(w, dtype, layer.post_norm)
    gate_up = naive.deinterleave(layer.moe.shared_gate_up.dense(dtype))
    logits = naive.linear(x, layer.moe.router)[:, :used]
    return {"logits": logits, "shared": naive.swiglu(x, gate_up)}


def _hidden(w: Workbench) -> Tensor:
    """Expert activations [rows, top_k + 1, width], the power of two of the storage undone."""
    h = w.buffers.h.view(buffers.MAX_ROWS, w.config.top_k + 1, -1)[: w.rows]
    return h.double() * 16


def _router_wrote(w: Workbench) -> Outputs:
    logits = w.buffers.router[: w.rows, : w.config.experts + 1]
    return {"logits": logits, "shared": _hidden(w)[:, -1]}


def _gate_up(w: Workbench, dtype: torch.dtype) -> Outputs:
    layer = _first(w)
    x, matrix = _normed(w, dtype, layer.post_norm), layer.moe.gate_up
    rows = [
        torch.cat(
            [naive.swiglu(x[r : r + 1], naive.deinterleave(matrix.dense(dtype, e))) for e in ids]
        )
        for r, ids in enumerate(w.ids.tolist())
    ]
    return {"h": torch.stack(rows)}


def _parts(w: Workbench, dtype: torch.dtype) -> Tensor:
    """Down projections [rows, top_k + 1, hidden] of what lies in h."""
    moe, h = _first(w).moe, _hidden(w).to(dtype)
    rows = []
    for r, ids in enumerate(w.ids.tolist()):
        routed = [moe.down.dense(dtype, e) @ h[r, i] for i, e in enumerate(ids)]
        rows.append(torch.stack([*routed, moe.shared_down.dense(dtype) @ h[r, -1]]))
    return torch.stack(rows)


def _mixture(w: Workbench, dtype: torch.dtype) -> Tensor:
    shared = torch.sigmoid(w.buffers.router[: w.rows, w.config.experts, None].to(dtype))
    return torch.cat((w.gates.to(dtype), shared), 1)


def _single_down(w: Workbench, dtype: torch.dtype) -> Outputs:
    mixed = (_mixture(w, dtype)[..., None] * _parts(w, dtype)).sum(1)
    return {"x": w.buffers.x[:1].to(dtype) + mixed}


def _head(w: Workbench, dtype: torch.dtype) -> Outputs:
    return {"logits": naive.linear(_normed(w, dtype, w.weights.final_norm), w.weights.head)}


def _embed(w: Workbench, dtype: torch.dtype) -> Outputs:
    return {"x": w.weights.embedding[w.slots.token[: w.rows]].to(dtype)}


def _route(w: Workbench, dtype: torch.dtype) -> Outputs:
    """Mixture weights, and one plus the rank of each expert that a row chose."""
    ranks = torch.zeros(w.rows, w.config.experts, dtype=dtype, device=w.ids.device)
    places = torch.arange(1, w.config.top_k + 1, device=w.ids.device).to(dtype)
    ranks.scatter_(1, w.ids, places.expand(w.rows, -1))
    return {"weights": _mixture(w, dtype), "ranks": ranks}


def _routed_lists(w: Workbench) -> Outputs:
    per, units, members = w.config.top_k + 1, w.buffers.units.tolist(), w.buffers.members.tolist()
    ranks = torch.zeros(w.rows, w.config.experts, dtype=torch.float64)
    for i in range(units[0]):
        expert, first, count = units[1 + 3 * i : 4 + 3 * i]
        for member in members[first : first + count]:
            ranks[member // per, expert] = member % per + 1
    return {"weights": w.buffers.weights[: w.rows], "ranks": ranks.to(w.ids.device)}


def _combine(w: Workbench, dtype: torch.dtype) -> Outputs:
    """The experts of the first layer added in, normed for the second."""
    parts = w.buffers.parts.view(buffers.MAX_ROWS, w.config.top_k + 1, -1)[: w.rows].to(dtype)
    x = w.buffers.x[: w.rows].to(dtype) + (_mixture(w, dtype)[..., None] * parts).sum(1)
    return {"x": x, "xn": naive.rms_norm(x, w.weights.layers[1].input_norm, w.config.rms_eps)}


def _combine_kernels(w: Workbench) -> Outputs:
    w.launch("route")
    w.launch("combine_norm", reads="parts")
    return {"x": w.buffers.x[: w.rows], "xn": w.columns(w.buffers.xn)}


def _pick(w: Workbench, dtype: torch.dtype) -> Outputs:
    rows, logits = slice(0, w.rows), w.buffers.logits[: w.rows].to(dtype)
    state = (w.slots.temperature[rows], w.slots.seed[rows], w.slots.position[rows] + 1)
    tokens = sampler.pick(logits, *state)
    return {"token": tokens.to(dtype), "logprob": naive.log_softmax_at(logits, tokens)}


def _pick_kernels(w: Workbench) -> Outputs:
    w.launch("pick_part")
    w.launch("pick_final")
    tokens, bits = w.buffers.out[:, : w.rows]
    return {"token": tokens, "logprob": bits.view(torch.float32)}


def _pair(name: str, naive_form, wrote) -> Operator:
    def kernel(w: Workbench) -> Outputs:
        (w.launch_single if name in arguments.OPERATIONS else w.launch)(name)
        return wrote(w)

    return Operator(naive_form, kernel)


def _attention_kernels(w: Workbench) -> Outputs:
    if w.rows == 1:
        w.launch_single("single_attention", "single_join")
    else:
        w.launch("attention")
        w.launch("attention_join")
    return {"out": w.columns(w.buffers.mixed), "pages": w.cache.pages[0]}


def _routed(name: str, naive_form, wrote) -> Operator:
    """A kernel that reads the lists of `route`."""

    def kernel(w: Workbench) -> Outputs:
        w.launch("route")
        w.launch(name)
        return wrote(w)

    return Operator(naive_form, kernel)


def _batched(kind: str, naive_form, wrote) -> dict[str, Operator]:
    return {f"{kind}_{n}": _pair(f"{kind}_{n}", naive_form, wrote) for n in (1, 2, 4)}


_FROM_FIRST = (lambda w, d: _projection(w, d, _first(w)), lambda w: _projected(w, _first(w)))
_FROM_ATTENTION = (
    lambda w, d: _projection(w, d, w.layer(Attention)),
    lambda w: _projected(w, w.layer(Attention)),
)
_LOGITS = lambda w: {"logits": w.buffers.logits[: w.rows]}  # noqa: E731
_HIDDEN = lambda w: {"h": _hidden(w)[:, :-1]}  # noqa: E731

OPERATORS: dict[str, Operator] = {
    "single_embed": _pair("single_embed", _embed, lambda w: {"x": w.buffers.x[: w.rows]}),
    "embed": _pair("embed", _embed, lambda w: {"x": w.buffers.x[: w.rows]}),
    "single_in": _pair("single_in", *_FROM_FIRST),
    "single_delta": _pair("single_delta", _delta, _delta_wrote),
    "single_out_gated": _pair(
        "single_out_gated", lambda w, d: _output(w, d, "single_out_gated"), _output_wrote
    ),
    "single_out_raw": _pair(
        "single_out_raw", lambda w, d: _output(w, d, "single_out_raw"), _output_wrote
    ),
    "attention": Operator(_attention, _attention_kernels),
    "single_attention": Operator(_attention, _attention_kernels),
    "single_join": Operator(_attention, _attention_kernels),
    "single_router": _pair("single_router", _router, _router_wrote),
    "single_gate_up": _pair("single_gate_up", _gate_up, _HIDDEN),
    "single_down": _pair("single_down", _single_down, lambda w: {"x": w.buffers.x[:1]}),
    "single_head": _pair("single_head", _head, _LOGITS),
    **_batched("batched_in", *_FROM_FIRST),
    **_batched("batched_qkv", *_FROM_ATTENTION),
    "delta_batched": _pair("delta_batched", _delta, _delta_wrote),
    **_batched("batched_out", lambda w, d: _output(w, d, "batched_out"), _output_wrote),
    **_batched("batched_router", _router, _router_wrote),
    "moe_gate_up": _routed("moe_gate_up", _gate_up, _HIDDEN),
    "moe_down": _routed(
        "moe_down",
        lambda w, d: {"parts": _parts(w, d)},
        lambda w: {
            "parts": w.buffers.parts.view(buffers.MAX_ROWS, w.config.top_k + 1, -1)[: w.rows]
        },
    ),
    "route": _pair("route", _route, _routed_lists),
    "combine_norm": Operator(_combine, _combine_kernels),
    **_batched("head", _head, _LOGITS),
    "pick_final": Operator(_pick, _pick_kernels),
}


def _rows(name: str) -> range:
    """The counts that a kernel is launched for: one, or as many as its tiles of columns hold."""
    tiles = {"1": range(2, 9), "2": range(9, 17), "4": range(17, 33)}
    default = range(1, 2) if name.startswith("single") else range(2, buffers.MAX_ROWS + 1)
    return tiles.get(name.rpartition("_")[2], default)


OPERATORS = {name: replace(pair, rows=_rows(name)) for name, pair in OPERATORS.items()}

"""Prompts on the GPU: dense products through torch in fp16, experts and delta rule by kernels.

The slot and the number of rows are read on the device, so that a captured graph serves every
sequence that begins at position 0; rows beyond the prompt's end are computed and never looked at.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from . import arguments as c
from . import buffers, naive, steps
from .arguments import fill
from .cache import Cache
from .config import Config
from .cuda import Kernels
from .formats import Matrix
from .weights import Attention, Gdn, Layer, Weights

H_SCALE = 1 / 16  # as in kernels/common.cuh
UNIT_ROWS = 8  # as in kernels/experts.cu


class Dense:
    """A matrix as fp16 values under one power of two, with what is left per row in float32."""

    def __init__(self, matrix: Matrix) -> None:
        alpha = matrix.alpha.repeat_interleave(8)
        power = torch.exp2(torch.round(torch.log2(alpha.clamp_min(1e-30))))
        unit = Matrix(**{**vars(matrix), "alpha": torch.ones_like(matrix.alpha)})
        self.values = (unit.dense(torch.float32) * power[:, None]).half().T
        self.rest = alpha / power

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] fp16 -> [T, N] float32."""
        return torch.mm(x, self.values, out_dtype=torch.float32) * self.rest


class Prefill:
    """Runs the rows of one sequence at a time."""

    def __init__(
        self, config: Config, weights: Weights, cache: Cache, kernels: Kernels, sms: int
    ) -> None:
        self.config, self.weights, self.cache = config, weights, cache
        self.kernels, self.sms = kernels, sms
        self.dense = [self._dense(layer) for layer in weights.layers]

    def _dense(self, layer: Layer) -> dict[str, Dense]:
        mixer, moe = layer.mixer, layer.moe
        gdn = isinstance(mixer, Gdn)
        found = {"in": mixer.in_proj, "ab": mixer.ab} if gdn else {"in": mixer.qkv}
        found |= {"out": mixer.out, "router": moe.router}
        found |= {"shared_gate_up": moe.shared_gate_up, "shared_down": moe.shared_down}
        return {name: Dense(matrix) for name, matrix in found.items()}

    def __call__(
        self, tokens: Tensor, where: Tensor, start: int, routing: list | None = None
    ) -> Tensor:
        """Residual stream [T, H] after all layers of tokens that begin at position `start`.

        where: int64 [slot, start, rows] on the device; rows may be fewer than T at start 0.
        """
        x = self.weights.embedding[tokens].float()
        xn = self._norm(x, self.weights.layers[0].input_norm)
        counts = {Gdn: 0, Attention: 0}
        for index, layer in enumerate(self.weights.layers):
            kind, dense = type(layer.mixer), self.dense[index]
            mix = self._gdn if kind is Gdn else self._attention
            x += dense["out"](mix(layer.mixer, dense, xn, counts[kind], where, start))
            counts[kind] += 1
            xn = self._norm(x, layer.post_norm)
            following = self.weights.layers[index + 1 :]
            norm = following[0].input_norm if following else self.weights.final_norm
            xn = self._moe(layer, dense, x, xn, norm, routing)
        return x

    def _norm(self, x: Tensor, norm: Tensor, parts=0, weights=0) -> Tensor:
        xn = torch.empty(x.shape, dtype=torch.float16, device=x.device)
        args = fill(
            c.NormArgs,
            x=x,
            parts=parts,
            weights=weights,
            norm=norm,
            row_slot=self._no_scratch(len(x)),
            xn=xn,
            scratch=-1,
            block_stride=buffers.X_COLUMNS,
            row_stride=self.config.hidden,
            eps=self.config.rms_eps,
        )
        self.kernels["combine_norm"].launch(len(x), 256, args)
        return xn

    def _no_scratch(self, rows: int) -> Tensor:
        if not hasattr(self, "_zeros") or len(self._zeros) < rows:
            self._zeros = torch.zeros(rows, dtype=torch.int32, device=self.cache.states.device)
        return self._zeros

    def _gdn(self, mixer: Gdn, dense, xn: Tensor, index: int, where: Tensor, start: int):
        config, rows = self.config, len(xn)
        y, ab = dense["in"](xn), dense["ab"](xn)
        mixed = torch.empty(rows, config.conv_width, device=xn.device)
        gates = torch.empty(rows, 2 * config.value_heads, device=xn.device)
        # Rows beyond the prompt stay zero: a NaN there would pass through masked values.
        o = torch.zeros(rows, config.value_width, device=xn.device)
        args = fill(
            c.PrefillArgs,
            qkv=y,
            ab=ab,
            conv=mixer.conv,
            a_log=mixer.a_log,
            dt_bias=mixer.dt_bias,
            ring=self.cache.rings[index],
            state=self.cache.states[index],
            mixed=mixed,
            gates=gates,
            o=o,
            where=where,
            ld=y.shape[1],
            ld_ab=ab.shape[1],
        )
        blocks = config.conv_width // 128
        self.kernels["prefill_conv"].launch((blocks, rows), 128, args)
        self.kernels["prefill_ring"].launch(blocks, 128, args)
        self.kernels["prefill_delta"].launch(config.value_heads * 4, 256, args)
        z = y[:, config.conv_width :]
        return naive.gated_norm(o, z, mixer.norm, config.rms_eps, config.value_dim).half()

    def _attention(
        self, mixer: Attention, dense, xn: Tensor, index: int, where: Tensor, start: int
    ) -> Tensor:
        config, rows = self.config, len(xn)
        qkv, pages = dense["in"](xn), self.cache.pages[index]
        query, gate, key, value = naive._split_qkv(qkv, mixer.q_norm, mixer.k_norm, start, config)
        key, value = key.to(pages.dtype), value.to(pages.dtype)
        positions = torch.arange(start, start + rows, device=xn.device)
        page, table = pages.shape[3], self.cache.page_table.index_select(0, where[:1])[0].long()
        cells = table[positions // page]
        pages[cells, 0, :, positions % page] = key
        pages[cells, 1, :, positions % page] = value
        mask = None
        if start:
            used = table[: (start + rows - 1) // page + 1]
            key, value = (
                pages[used, i].transpose(1, 2).flatten(0, 1)[: start + rows] for i in (0, 1)
            )
            mask = torch.arange(start + rows, device=xn.device)[None] <= positions[:, None]
        heads_first = lambda t: t.to(pages.dtype).transpose(0, 1)[None]  # noqa: E731
        out = F.scaled_dot_product_attention(
            *(heads_first(t) for t in (query, key, value)),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        return (out[0].transpose(0, 1).flatten(1) * gate.sigmoid()).half()

    def _moe(self, layer: Layer, dense, x: Tensor, xn: Tensor, norm: Tensor, routing) -> Tensor:
        config, rows = self.config, len(x)
        per = config.top_k + 1
        logits = dense["router"](xn)[:, : config.experts + 1]
        ids, weights = naive.top_experts(logits[:, :-1], config.top_k)
        if routing is not None:
            routing.append(ids)
        weights = torch.cat((weights, logits[:, -1:].sigmoid()), 1)
        units, members = self._lists(ids)
        h = torch.empty(rows, per, config.expert_width, dtype=torch.float16, device=x.device)
        parts = torch.empty(rows, per, config.hidden, device=x.device)
        pairs = dense["shared_gate_up"](xn).unflatten(1, (-1, 2, 8))
        shared = (F.silu(pairs[:, :, 0]) * pairs[:, :, 1]).flatten(1)
        parts[:, -1] = dense["shared_down"]((shared * H_SCALE).half()) / H_SCALE
        lists = {"units": units, "members": members, "x": xn, "h": h, "out": parts}
        strides = (buffers.X_COLUMNS, config.hidden)
        up, down = steps.moe_args(layer.moe, lists, rows, strides, shared=False)
        self.kernels["moe_gate_up"].launch(self.sms, buffers.MOE_THREADS, up, buffers.MOE_SHARED)
        self.kernels["moe_down"].launch(self.sms, buffers.MOE_THREADS, down, buffers.MOE_SHARED)
        return self._norm(x, norm, parts, weights)

    def _lists(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Units of up to eight rows of one expert, and the rows grouped by expert."""
        experts, per = self.config.experts, self.config.top_k
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        members = order // per * (per + 1) + order % per
        count = torch.zeros(experts, dtype=torch.int64, device=ids.device)
        count.scatter_add_(0, flat, torch.ones_like(flat))
        of_expert = (count + UNIT_ROWS - 1) // UNIT_ROWS
        unit = torch.arange(experts + len(ids), device=ids.device)  # at least as many as there are
        expert = torch.searchsorted(of_expert.cumsum(0), unit, right=True).clamp_max(experts - 1)
        done = (unit - (of_expert.cumsum(0) - of_expert)[expert]) * UNIT_ROWS
        first = (count.cumsum(0) - count)[expert] + done
        rows = (count[expert] - done).clamp_max(UNIT_ROWS)
        table = torch.stack((expert, first, rows), 1).flatten()
        return torch.cat((of_expert.sum()[None], table)).int(), members.int()

"""Prompts on the GPU: dense products through torch in fp16, everything between by kernels.

The slot and the number of rows are read on the device, so that a captured graph serves every
sequence that begins at position 0; rows beyond the prompt's end are computed and never looked at.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from . import arguments as c
from .arguments import fill
from .buffers import MOE_THREADS, PROMPT_SHARED, PROMPT_UNIT
from .cache import PAGE, Cache
from .config import Config
from .cuda import Kernels
from .formats import Matrix
from .weights import Attention, Gdn, Layer, Weights

H_SCALE = 1 / 16  # as in kernels/common.cuh
CHUNK, CHUNK_PAD = 64, 8  # tokens of a chunk of the delta rule, padding of its rows: chunked.cu
CHUNK_SHARED = CHUNK * ((CHUNK + CHUNK_PAD) * 4 + (128 + CHUNK_PAD) * 2 + 256 * 4)
SCAN_SHARED = 2 * (
    3 * CHUNK * (128 + CHUNK_PAD) * 2 + (CHUNK * 2 + 32 * 4) * (CHUNK + CHUNK_PAD) + CHUNK * 4
)


class Dense:
    """Matrices stacked along their rows as fp16 values under powers of two.

    What is left of each row's multiplier is `alpha`, which the reader of a product applies.
    """

    def __init__(self, *matrices: Matrix) -> None:
        values, rest = zip(*map(self._half, matrices), strict=True)
        self.values, self.alpha = torch.cat(values).T, torch.cat(rest)

    @staticmethod
    def _half(matrix: Matrix) -> tuple[Tensor, Tensor]:
        alpha = matrix.alpha.repeat_interleave(8)
        power = torch.exp2(torch.round(torch.log2(alpha.clamp_min(1e-30))))
        unit = Matrix(**{**vars(matrix), "alpha": torch.ones_like(matrix.alpha)})
        return (unit.dense(torch.float32) * power[:, None]).half(), alpha / power

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] fp16 -> [T, N] float32, to be multiplied by alpha [N]."""
        return torch.mm(x, self.values, out_dtype=torch.float32)


class Prefill:
    """Runs the rows of one sequence at a time."""

    def __init__(
        self,
        config: Config,
        weights: Weights,
        cache: Cache,
        kernels: Kernels,
        rope: Tensor,
        sms: int,
    ) -> None:
        self.config, self.weights, self.cache, self.rope = config, weights, cache, rope
        self.kernels, self.sms = kernels, sms
        self.dense = [self._dense(layer) for layer in weights.layers]

    def _dense(self, layer: Layer) -> dict[str, Dense]:
        mixer, moe = layer.mixer, layer.moe
        inner = (mixer.in_proj, mixer.ab) if isinstance(mixer, Gdn) else (mixer.qkv,)
        dense = {
            "in": Dense(*inner),
            "out": Dense(mixer.out),
            "router": Dense(moe.router, moe.shared_gate_up),
            "shared_down": Dense(moe.shared_down),
        }
        dense["shared_down"].alpha /= H_SCALE  # that its operand bears
        return dense

    def __call__(
        self, tokens: Tensor, where: Tensor, start: int, routing: list | None = None
    ) -> Tensor:
        """Residual stream [T, H] after all layers of tokens that begin at position `start`.

        where: int64 [slot, start, rows] on the device; rows may be fewer than T at start 0.
        """
        x = self.weights.embedding[tokens].float()
        xn = self.norm(x, self.weights.layers[0].input_norm)
        counts = {Gdn: 0, Attention: 0}
        for index, layer in enumerate(self.weights.layers):
            kind, dense = type(layer.mixer), self.dense[index]
            y, mix = dense["in"](xn), self.delta if kind is Gdn else self.attention
            mixed = mix(layer.mixer, y, dense["in"].alpha, counts[kind], where, start)
            counts[kind] += 1
            out = dense["out"]
            xn = self.norm(x, layer.post_norm, add=out(mixed), alpha=out.alpha)
            following = self.weights.layers[index + 1 :]
            norm = following[0].input_norm if following else self.weights.final_norm
            xn = self.experts(layer, dense, x, xn, norm, routing)
        return x

    def norm(self, x: Tensor, norm: Tensor, **added: Tensor) -> Tensor:
        """Norm [T, H] fp16 of the residual stream, to which `add` and `parts` are added first."""
        xn = torch.empty(x.shape, dtype=torch.float16, device=x.device)
        args = fill(c.PromptNormArgs, x=x, norm=norm, xn=xn, eps=self.config.rms_eps, **added)
        self.kernels["prompt_norm"].launch(len(x), 256, args)
        return xn

    def delta(
        self, mixer: Gdn, y: Tensor, alpha: Tensor, index: int, where: Tensor, start: int
    ) -> Tensor:
        """Convolution, delta rule and gate: y [T, q k v z a b] -> [T, value_width] fp16."""
        config, rows = self.config, len(y)
        chunks, heads = -(-rows // CHUNK), config.value_heads
        padded, key = chunks * CHUNK, config.key_dim + CHUNK_PAD
        make = lambda *shape, dtype=torch.float32: torch.empty(  # noqa: E731
            shape, dtype=dtype, device=y.device
        )
        half = torch.float16
        kept = {
            "q": make(config.key_heads, padded, key, dtype=half),
            "k": make(config.key_heads, padded, key, dtype=half),
            "v": make(padded, config.value_width),
            "gates": make(2, heads, padded),
            "sums": make(heads, padded),
            "w": make(heads, padded, key, dtype=half),
            "p": make(heads, padded, CHUNK + CHUNK_PAD, dtype=half),
            "u": make(heads, chunks, config.value_dim, CHUNK + CHUNK_PAD),
            "o": make(padded, config.value_width),
            "gated": make(rows, config.value_width, dtype=half),
        }
        args = fill(
            c.ChunkArgs,
            y=y,
            alpha=alpha,
            conv=mixer.conv,
            a_log=mixer.a_log,
            dt_bias=mixer.dt_bias,
            norm=mixer.norm,
            ring=self.cache.rings[index],
            state=self.cache.states[index],
            where=where,
            padded=padded,
            ld=y.shape[1],
            eps=config.rms_eps,
            **kept,
        )
        launch = lambda name, *how: self.kernels[f"prompt_{name}"].launch(*how)  # noqa: E731
        launch("conv", (config.conv_width // 128 + 1, chunks), 256, args)
        launch("chunk", (chunks, heads), 256, args, CHUNK_SHARED)
        launch("scan", heads * config.value_dim // 32, 64, args, SCAN_SHARED)
        launch("gated", (rows, heads // 8), 256, args)
        return kept["gated"]

    def attention(
        self, mixer: Attention, y: Tensor, alpha: Tensor, index: int, where: Tensor, start: int
    ) -> Tensor:
        """Causal attention over the cache, gated: y [T, qkv_width] -> [T, heads * D] fp16."""
        config, rows, pages = self.config, len(y), self.cache.pages[index]
        make = lambda heads: torch.empty(  # noqa: E731
            heads, rows, config.head_dim, dtype=pages.dtype, device=y.device
        )
        query, key, value = make(config.heads), make(config.kv_heads), make(config.kv_heads)
        gated = torch.empty(rows, config.attention_width, dtype=torch.float16, device=y.device)
        args = fill(
            c.PromptHeadsArgs,
            y=y,
            alpha=alpha,
            q_norm=mixer.q_norm,
            k_norm=mixer.k_norm,
            rope=self.rope,
            page_table=self.cache.page_table,
            pages=pages,
            q=query,
            k=key,
            v=value,
            gated=gated,
            where=where,
            rows=rows,
            ld=y.shape[1],
            pages_per_slot=self.cache.pages_per_slot,
            eps=config.rms_eps,
        )
        heads = config.heads + 2 * config.kv_heads
        self.kernels["prompt_heads"].launch((rows, heads // 4), 128, args)
        mask = None
        if start:
            key, value, mask = self._earlier(pages, where, start, rows)
        mixed = F.scaled_dot_product_attention(
            query[None],
            key[None],
            value[None],
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        ).contiguous()
        args.mixed = mixed.data_ptr()
        self.kernels["prompt_gate"].launch((rows, config.heads // 4), 128, args)
        return gated

    def _earlier(self, pages: Tensor, where: Tensor, start: int, rows: int):
        """Keys and values [kv heads, S, D] of the whole sequence so far, and who sees whom."""
        end = start + rows
        used = self.cache.page_table.index_select(0, where[:1])[0, : (end - 1) // PAGE + 1].long()
        key, value = (pages[used, i].transpose(0, 1).flatten(1, 2)[:, :end] for i in (0, 1))
        at = torch.arange(end, device=pages.device)
        return key, value, at[None] <= at[start:, None]

    def experts(
        self, layer: Layer, dense: dict, x: Tensor, xn: Tensor, norm: Tensor, routing: list | None
    ) -> Tensor:
        """Add the experts' outputs to x and norm what comes out: [T, H] fp16."""
        config, moe, rows = self.config, layer.moe, len(x)
        pairs, half = rows * config.top_k, {"dtype": torch.float16, "device": x.device}
        lists = self._route(dense["router"], xn)
        if routing is not None:
            routing.append(lists["ids"].long())
        h = torch.empty(pairs, config.expert_width, **half)
        parts = torch.empty(pairs, config.hidden, **half)
        for name, matrix, x_in, out in (
            ("prompt_gate_up", moe.gate_up, xn, h),
            ("prompt_down", moe.down, h, parts),
        ):
            args = fill(
                c.PromptMoeArgs,
                weight=matrix.values,
                alpha=matrix.alpha,
                units=lists["units"],
                members=lists["members"],
                x=x_in,
                out=out,
            )
            self.kernels[name].launch(self.sms, MOE_THREADS, args, PROMPT_SHARED)
        down = dense["shared_down"]
        return self.norm(
            x,
            norm,
            add=down(lists["shared"]),
            alpha=down.alpha,
            parts=parts,
            weights=lists["weights"],
        )

    def _route(self, dense: Dense, xn: Tensor) -> dict[str, Tensor]:
        """Chosen experts and weights of each row, lists by expert, the shared expert's SwiGLU."""
        config, rows, y = self.config, len(xn), dense(xn)
        make = lambda *shape, dtype=torch.int32: torch.empty(  # noqa: E731
            shape, dtype=dtype, device=xn.device
        )
        lists = {
            "ids": make(rows, config.top_k, dtype=torch.uint8),
            "weights": make(rows, config.top_k + 1, dtype=torch.float32),
            "shared": make(rows, config.shared_width, dtype=torch.float16),
            "members": make(config.experts, rows),
            "counts": make(config.experts),
            "units": make(1 + 3 * (config.experts + rows * config.top_k // PROMPT_UNIT)),
        }
        args = fill(c.PromptRouteArgs, y=y, alpha=dense.alpha, rows=rows, ld=y.shape[1], **lists)
        self.kernels["prompt_route"].launch(rows, 256, args)
        self.kernels["prompt_members"].launch(config.experts, 256, args)
        self.kernels["prompt_units"].launch(1, config.experts, args)
        return lists

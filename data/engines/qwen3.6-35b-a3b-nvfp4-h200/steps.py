"""One decode step as a list of kernel launches; here for two to 32 rows, in single.py for one.

The lists are built once; running one queues it on the current stream, where a CUDA graph may
capture it. The order of kernels is the order of the lines below.
"""

from dataclasses import dataclass

from torch import Tensor

from . import arguments as c
from .arguments import fill
from .buffers import (
    ATTENTION_SHARED,
    BLOCK_TILES,
    GROUP_BYTES,
    MAX_ROWS,
    MOE_SHARED,
    MOE_THREADS,
    OUT_PARTS,
    PICK_BLOCKS,
    STAGES,
    TILE,
    X_COLUMNS,
    X_STRIDE,
    Buffers,
    SlotState,
    splits_for,
    tile_bytes,
)
from .cache import Cache
from .config import Config
from .cuda import Kernels
from .formats import Matrix
from .weights import Attention, Gdn, Layer, Moe, Weights


@dataclass
class Launch:
    """A kernel with everything it needs."""

    kernel: str
    grid: tuple[int, ...]
    block: int
    args: object
    shared: int = 0


class Step:
    """What the two kinds of step share: embedding, arguments of the mixers, pick."""

    def __init__(
        self,
        config: Config,
        weights: Weights,
        cache: Cache,
        buffers: Buffers,
        slots: SlotState,
        rope: Tensor,
        rows: int,
        multiprocessors: int,
    ) -> None:
        self.config, self.weights, self.cache, self.rows = config, weights, cache, rows
        self.b, self.slots, self.rope, self.sms = buffers, slots, rope, multiprocessors
        self.launches: list[Launch] = []
        self._build()

    @property
    def operators(self) -> set[str]:
        """Names of what the step runs, as OPERATORS has them."""
        return {launch.kernel for launch in self.launches}

    def run(self, kernels: Kernels) -> None:
        """Queue the step on the current stream."""
        for launch in self.launches:
            kernels[launch.kernel].launch(launch.grid, launch.block, launch.args, launch.shared)

    def _add(self, kernel: str, grid, block: int, args, shared: int = 0) -> None:
        grid = grid if isinstance(grid, tuple) else (grid,)
        self.launches.append(Launch(kernel, grid, block, args, shared))

    def _build(self) -> None:
        self._embed()
        counts = {Gdn: 0, Attention: 0}
        for index, layer in enumerate(self.weights.layers):
            kind = type(layer.mixer)
            if kind is Gdn:
                self._gdn(layer, counts[kind])
            else:
                self._attention(layer, counts[kind])
            counts[kind] += 1
            self._moe(index, layer)
        self._head()
        self._pick()

    def _embed(self) -> None:
        args = fill(
            c.EmbedArgs,
            table=self.weights.embedding,
            row_slot=self.b.row_slot,
            token=self.slots.token,
            x=self.b.x,
        )
        self._add("embed", self.rows, 256, args)

    def _delta_args(self, mixer: Gdn, index: int):
        b = self.b
        return fill(
            c.DeltaArgs,
            qkv=b.y,
            ab=b.ab,
            conv=mixer.conv,
            a_log=mixer.a_log,
            dt_bias=mixer.dt_bias,
            norm=mixer.norm,
            row_slot=b.row_slot,
            position=self.slots.position,
            ring=self.cache.rings[index],
            state=self.cache.states[index],
            o=b.o,
            gated=b.mixed,
            rows=self.rows,
            ld=b.ld,
            ld_ab=b.ld_ab,
            eps=self.config.rms_eps,
        )

    def _attention_args(self, mixer: Attention, index: int, splits: int):
        b = self.b
        return fill(
            c.AttentionArgs,
            qkv=b.y,
            q_norm=mixer.q_norm,
            k_norm=mixer.k_norm,
            rope=self.rope,
            row_slot=b.row_slot,
            position=self.slots.position,
            page_table=self.cache.page_table,
            pages=self.cache.pages[index],
            parts=b.attention,
            stats=b.stats,
            out=b.mixed,
            ld=b.ld,
            pages_per_slot=self.cache.pages_per_slot,
            splits=splits,
            eps=self.config.rms_eps,
        )

    def _pick(self) -> None:
        args = pick_args(self.b, self.slots, self.b.logits, self.cache.scratch, advance=1)
        self._add("pick_part", (PICK_BLOCKS, self.rows), 256, args)
        self._add("pick_final", 1, 32 * self.rows, args)


def pick_args(b: Buffers, slots: SlotState, logits: Tensor, scratch: int, advance: int):
    """Arguments of the two pick kernels; log probabilities are always of b.logits."""
    return fill(
        c.PickArgs,
        logits=logits,
        model_logits=b.logits,
        row_slot=b.row_slot,
        token=slots.token,
        position=slots.position,
        temperature=slots.temperature,
        seed=slots.seed,
        parts=b.pick,
        out_token=b.out[0],
        out_logprob=b.out[1],
        advance=advance,
        scratch=scratch,
    )


class BatchedStep(Step):
    """Two to 32 rows: products in clusters, routing listed once, norms with the combine."""

    @property
    def column_tiles(self) -> int:
        return 1 if self.rows <= 8 else 2 if self.rows <= 16 else 4

    def _linear(self, kind: str, main: Matrix, second: Matrix | None = None, **fields) -> None:
        per, nt = BLOCK_TILES[f"{kind.upper()}_TILES"], self.column_tiles
        blocks = -(-main.rows // TILE // per)
        args = fill(
            c.BatchArgs,
            weight=main.values,
            alpha=main.alpha,
            tiles=main.rows // TILE,
            blocks_main=blocks,
            **fields,
        )
        x_bytes, stage = nt * 8 * X_STRIDE * 2, lambda m: tile_bytes(m) * X_COLUMNS // m.cols
        shared = max(STAGES * (x_bytes + per * stage(main)), per * 8 * nt * 8 * 17 * 4)
        if second is not None:
            args.weight16, args.alpha16 = second.values.data_ptr(), second.alpha.data_ptr()
            args.tiles16, args.ld16 = second.rows // TILE, second.rows
            shared = max(shared, STAGES * (x_bytes + stage(second)))
        grid = (blocks + args.tiles16, OUT_PARTS if kind == "out" else 1)
        self._add(f"batched_{kind}_{nt}", grid, 256, args, shared)

    def _norm(self, norm: Tensor, add: str = "") -> None:
        """Norm after adding nothing, the mixer's "sums" or the experts' "parts"."""
        b = self.b
        args = fill(
            c.NormArgs,
            x=b.x,
            parts=b.parts if add == "parts" else 0,
            sums=b.sums if add == "sums" else 0,
            weights=b.weights,
            norm=norm,
            row_slot=b.row_slot,
            xn=b.xn,
            scratch=self.cache.scratch,
            block_stride=MAX_ROWS * X_STRIDE,
            row_stride=X_STRIDE,
            eps=self.config.rms_eps,
        )
        self._add("combine_norm", self.rows, 256, args)

    def _embed(self) -> None:
        super()._embed()
        self._norm(self.weights.layers[0].input_norm)

    def _gdn(self, layer: Layer, index: int) -> None:
        b, mixer = self.b, layer.mixer
        self._linear("in", mixer.in_proj, mixer.ab, x=b.xn, y=b.y, ld=b.ld, y16=b.ab)
        config = self.config
        blocks = min(self.sms, self.rows * config.value_heads)
        state = config.value_dim * config.key_dim * 4
        self._add("delta_batched", blocks, 512, self._delta_args(mixer, index), 3 * state)
        self._linear("out", mixer.out, x=b.mixed, y=b.sums, ld=self.config.hidden)

    def _attention(self, layer: Layer, index: int) -> None:
        b, mixer = self.b, layer.mixer
        self._linear("qkv", mixer.qkv, x=b.xn, y=b.y, ld=b.ld)
        config, splits = self.config, splits_for(self.rows, self.cache.pages_per_slot)
        args = self._attention_args(mixer, index, splits)
        self._add("attention", (splits, config.kv_heads, self.rows), 256, args, ATTENTION_SHARED)
        self._add("attention_join", (config.heads, self.rows), config.head_dim, args)
        self._linear("out", mixer.out, x=b.mixed, y=b.sums, ld=self.config.hidden)

    def _moe(self, index: int, layer: Layer) -> None:
        b, moe = self.b, layer.moe
        self._norm(layer.post_norm, "sums")
        self._linear("router", moe.shared_gate_up, moe.router, x=b.xn, y16=b.router, h=b.h)
        route = fill(
            c.RouteArgs,
            logits=b.router,
            row_slot=b.row_slot,
            weights=b.weights,
            units=b.units,
            members=b.members,
            touched_sum=b.touched,
            rows=self.rows,
            scratch=self.cache.scratch,
        )
        self._add("route", 1, 1024, route)
        up, down = self._moe_args(moe)
        self._add("moe_gate_up", self.sms, MOE_THREADS, up, MOE_SHARED)
        self._add("moe_down", self.sms, MOE_THREADS, down, MOE_SHARED)
        following = self.weights.layers[index + 1 :]
        norm = following[0].input_norm if following else self.weights.final_norm
        self._norm(norm, "parts")

    def _moe_args(self, moe: Moe):
        """Arguments of moe_gate_up and of moe_down, which does the shared expert as well."""
        b, common = self.b, {"units": self.b.units, "members": self.b.members, "rows": self.rows}
        up = fill(
            c.MoeArgs,
            weight=moe.gate_up.values,
            alpha=moe.gate_up.alpha,
            x=b.xn,
            h=b.h,
            block_stride=MAX_ROWS * X_STRIDE,
            row_stride=X_STRIDE,
            **common,
        )
        down = fill(
            c.MoeArgs,
            weight=moe.down.values,
            alpha=moe.down.alpha,
            shared_weight=moe.shared_down.values,
            shared_alpha=moe.shared_down.alpha,
            x=b.h,
            out=b.parts,
            block_stride=X_COLUMNS,
            row_stride=moe.down.cols,
            **common,
        )
        return up, down

    def _head(self) -> None:
        head, b, nt = self.weights.head, self.b, self.column_tiles
        args = fill(
            c.BatchArgs,
            weight=head.values,
            alpha=head.alpha,
            x=b.xn,
            y=b.logits,
            ld=self.config.vocab,
            tiles=head.rows // TILE,
        )
        x_bytes = self.config.hidden // X_COLUMNS * nt * 8 * X_STRIDE * 2
        self._add(f"head_{nt}", self.sms, 512, args, x_bytes + 16 * 2 * 2 * GROUP_BYTES)

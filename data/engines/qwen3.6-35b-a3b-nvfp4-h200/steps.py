"""One decode step as a list of kernel launches: for one row, and for up to 32.

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
    IN_STAGES,
    MAX_ROWS,
    MOE_SHARED,
    MOE_THREADS,
    OUT_PARTS,
    PICK_BLOCKS,
    SINGLE_THREADS,
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
from .weights import Attention, Gdn, Layer, Weights


@dataclass
class Launch:
    """A kernel with everything it needs."""

    kernel: str
    grid: tuple[int, ...]
    block: int
    args: object
    shared: int = 0


class Step:
    """What the two kinds of step share: embedding, attention core, pick."""

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

    def _delta(self, mixer: Gdn, index: int) -> None:
        b, config = self.b, self.config
        args = fill(
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
            eps=config.rms_eps,
        )
        if self.rows == 1:
            self._add("delta_single", config.value_heads * config.value_dim // 32, 256, args)
            return
        blocks = min(self.sms, self.rows * config.value_heads)
        state = config.value_dim * config.key_dim * 4
        self._add("delta_batched", blocks, 512, args, 3 * state)

    def _attend(self, mixer: Attention, index: int) -> None:
        b, config = self.b, self.config
        splits = splits_for(self.rows, self.cache.pages_per_slot)
        args = fill(
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
            batched=self.rows > 1,
            eps=config.rms_eps,
        )
        self._add("attention", (splits, config.kv_heads, self.rows), 256, args, ATTENTION_SHARED)
        self._add("attention_join", (config.heads, self.rows), config.head_dim, args)

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


class SingleStep(Step):
    """One row: norms are recomputed by every block, routing by every warp; six kernels a layer."""

    def _linear(self, kernel: str, main: Matrix, second: Matrix | None, grid_main: int, **fields):
        args = fill(
            c.SingleArgs,
            weight=main.values,
            alpha=main.alpha,
            tiles=main.rows // TILE,
            grid_main=grid_main,
            eps=self.config.rms_eps,
            **fields,
        )
        if second is not None:
            args.weight16, args.alpha16 = second.values.data_ptr(), second.alpha.data_ptr()
        stages = IN_STAGES if kernel == "single_in" else 1
        shared = max(stages * tile_bytes(main), tile_bytes(second) if second else 0)
        grid = grid_main + (second.rows // TILE if second else 0)
        self._add(kernel, grid, SINGLE_THREADS, args, shared)

    def _gdn(self, layer: Layer, index: int) -> None:
        b, mixer = self.b, layer.mixer
        x = {"x": b.x, "norm": layer.input_norm}
        grid = self.sms - mixer.ab.rows // TILE
        self._linear("single_in", mixer.in_proj, mixer.ab, grid, y=b.y, y16=b.ab, **x)
        self._delta(mixer, index)
        z = b.y[0, self.config.conv_width :]
        gate = {"x": b.o, "z": z, "norm": mixer.norm}
        self._linear("single_out_gated", mixer.out, None, mixer.out.rows // TILE, y=b.x, **gate)

    def _attention(self, layer: Layer, index: int) -> None:
        b, mixer = self.b, layer.mixer
        x = {"x": b.x, "norm": layer.input_norm}
        self._linear("single_in", mixer.qkv, None, self.sms, y=b.y, **x)
        self._attend(mixer, index)
        out = mixer.out
        self._linear("single_out_raw", out, None, out.rows // TILE, y=b.x, half_x=b.mixed)

    def _moe(self, index: int, layer: Layer) -> None:
        b, moe, config = self.b, layer.moe, self.config
        x = {"x": b.x, "norm": layer.post_norm}
        shared = moe.shared_gate_up
        grid = shared.rows // TILE
        self._linear("single_router", shared, moe.router, grid, y16=b.router, h=b.h, **x)
        common = {"logits": b.router, "h": b.h, "eps": config.rms_eps, **x}
        up = fill(
            c.ExpertArgs,
            weight=moe.gate_up.values,
            alpha=moe.gate_up.alpha,
            **common,
        )
        shared = 4 * tile_bytes(moe.shared_gate_up)
        blocks = config.top_k * config.expert_width // 8 // 4
        self._add("single_gate_up", blocks, SINGLE_THREADS, up, shared)
        down = fill(
            c.ExpertArgs,
            weight=moe.down.values,
            alpha=moe.down.alpha,
            shared_weight=moe.shared_down.values,
            shared_alpha=moe.shared_down.alpha,
            **common,
        )
        self._add("single_down", config.hidden // TILE, 64 * (config.top_k + 1), down)

    def _head(self) -> None:
        head, b = self.weights.head, self.b
        args = fill(
            c.SingleArgs,
            weight=head.values,
            alpha=head.alpha,
            x=b.x,
            norm=self.weights.final_norm,
            y=b.logits,
            tiles=head.rows // TILE,
            eps=self.config.rms_eps,
        )
        self._add("single_head", self.sms, SINGLE_THREADS, args, 16 * 2 * 4 * GROUP_BYTES)


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
        self._delta(mixer, index)
        self._linear("out", mixer.out, x=b.mixed, y=b.sums, ld=self.config.hidden)

    def _attention(self, layer: Layer, index: int) -> None:
        b, mixer = self.b, layer.mixer
        self._linear("qkv", mixer.qkv, x=b.xn, y=b.y, ld=b.ld)
        self._attend(mixer, index)
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
        lists = {"units": b.units, "members": b.members, "x": b.xn, "h": b.h, "out": b.parts}
        strides = (MAX_ROWS * X_STRIDE, X_STRIDE)
        up, down = moe_args(moe, lists, self.rows, strides, shared=True)
        self._add("moe_gate_up", self.sms, MOE_THREADS, up, MOE_SHARED)
        self._add("moe_down", self.sms, MOE_THREADS, down, MOE_SHARED)
        following = self.weights.layers[index + 1 :]
        norm = following[0].input_norm if following else self.weights.final_norm
        self._norm(norm, "parts")

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


def moe_args(moe, lists: dict, rows: int, strides: tuple[int, int], shared: bool):
    """Arguments of moe_gate_up and moe_down; without `shared` the caller adds the shared expert.

    lists: units, members, x, h, out; strides: block and row stride of x (see kernels/experts.cu).
    """
    up = fill(
        c.MoeArgs,
        weight=moe.gate_up.values,
        alpha=moe.gate_up.alpha,
        rows=rows,
        block_stride=strides[0],
        row_stride=strides[1],
        **lists,
    )
    down = fill(
        c.MoeArgs,
        weight=moe.down.values,
        alpha=moe.down.alpha,
        rows=rows,
        block_stride=X_COLUMNS,
        row_stride=moe.down.cols,
        **{**lists, "x": lists["h"]},
    )
    if shared:
        down.shared_weight = moe.shared_down.values.data_ptr()
        down.shared_alpha = moe.shared_down.alpha.data_ptr()
    return up, down

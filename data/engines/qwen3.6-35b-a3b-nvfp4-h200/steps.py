"""One decode step as a list of kernel launches: for one row, and for up to 32.

The lists are built once; running one queues it on the current stream, where a CUDA graph may
capture it. The order of kernels is the order of the lines below.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import arguments as c
from .arguments import fill
from .cache import PAGE, Cache
from .config import Config
from .cuda import Kernels
from .formats import Matrix
from .weights import Attention, Gdn, Layer, Weights

MAX_ROWS = 32
PICK_BLOCKS = 64
TILE = 16
# Row tiles of a block in the batched products, blocks along K of the output projection, and tiles
# in flight of the single-row projection; the kernels are compiled for them.
BLOCK_TILES = {"IN_TILES": 6, "QKV_TILES": 5, "OUT_TILES": 4, "ROUTER_TILES": 1}
OUT_PARTS = 4
IN_STAGES = 5
# Shared memory of the kernels: columns and padded stride of a staged activation block, stages.
X_COLUMNS, X_STRIDE, STAGES = 256, 272, 3
GROUP_BYTES = 1152  # 16 rows x 128 columns of NVFP4


def defines(config: Config) -> dict[str, int]:
    """Sizes for the compiler; ValueError names a size that the kernels cannot serve."""
    need = {
        "head_dim": config.head_dim == 256,
        "linear_key_head_dim": config.key_dim == 128,
        "linear_value_head_dim": config.value_dim == 128,
        "num_experts_per_tok": config.top_k == 8,
        "num_experts": config.experts == 256,
        "shared_expert_intermediate_size": config.shared_width == config.expert_width,
        "hidden_size": config.hidden % 1024 == 0,
        "moe_intermediate_size": config.expert_width % 512 == 0,
        "vocab_size": config.vocab % 64 == 0,
        "num_attention_heads": config.attention_width == config.value_width
        and config.heads // config.kv_heads == 8,
    }
    for name, good in need.items():
        if not good:
            raise ValueError(f"config.json: {name} has no CUDA kernel; run on device cpu")
    sizes = {
        "HIDDEN": config.hidden,
        "WIDTH": config.expert_width,
        "EXPERTS": config.experts,
        "TOP_K": config.top_k,
        "VOCAB": config.vocab,
        "KEY_HEADS": config.key_heads,
        "VALUE_HEADS": config.value_heads,
        "KEY_DIM": config.key_dim,
        "VALUE_DIM": config.value_dim,
        "VALUE_WIDTH": config.value_width,
        "CONV_WIDTH": config.conv_width,
        "HEADS": config.heads,
        "KV_HEADS": config.kv_heads,
        "HEAD_DIM": config.head_dim,
        "ROPE_DIM": config.rope_dim,
    }
    return sizes | BLOCK_TILES | {"OUT_PARTS": OUT_PARTS, "IN_STAGES": IN_STAGES}


@dataclass
class Launch:
    """A kernel with everything it needs."""

    kernel: str
    grid: tuple[int, ...]
    block: int
    args: object
    shared: int = 0


class Buffers:
    """Memory between the kernels of a step, shared by all steps: they never run side by side."""

    def __init__(self, config: Config, device: torch.device) -> None:
        r = MAX_ROWS
        make = lambda *shape, dtype=torch.float32: torch.zeros(  # noqa: E731
            shape, dtype=dtype, device=device
        )
        self.ld = max(config.conv_width + config.value_width, config.qkv_width)
        self.ld_ab = -(-2 * config.value_heads // TILE) * TILE
        self.ld_router = (config.experts + TILE) // TILE * TILE
        self.x = make(r, config.hidden)
        self.xn = make(config.hidden // X_COLUMNS, r, X_STRIDE, dtype=torch.float16)
        self.sums = make(OUT_PARTS, r, config.hidden)
        self.y, self.ab = make(r, self.ld), make(r, self.ld_ab)
        self.o = make(1, config.value_width)
        self.mixed = make(config.value_width // X_COLUMNS, r, X_STRIDE, dtype=torch.float16)
        self.router = make(r, self.ld_router)
        per_token = config.top_k + 1
        self.h = make(r * per_token, config.expert_width, dtype=torch.float16)
        self.parts = make(r * per_token, config.hidden)
        self.weights = make(r, per_token)
        self.units = make(1 + 3 * config.experts, dtype=torch.int32)
        self.members = make(r * config.top_k, dtype=torch.int32)
        self.touched = make(1, dtype=torch.int32)
        self.attention = make(MAX_SPLIT_ROWS, config.heads, config.head_dim)
        self.stats = make(MAX_SPLIT_ROWS, config.heads, 2)
        self.logits = make(r, config.vocab)
        self.pick = make(r, PICK_BLOCKS, 4)
        self.out = make(2, r, dtype=torch.int32)  # tokens; bits of the log probabilities
        self.row_slot = make(r, dtype=torch.int32)


MAX_SPLIT_ROWS = 128  # attention splits x rows
ATTENTION_SHARED = 2 * 2 * 32 * (256 + 8) * 2  # stages, keys and values, tokens, padded rows


SINGLE_THREADS = 512
MOE_THREADS = 17 * 32
MOE_SHARED = 4 * (8 * 4 * GROUP_BYTES + 2 * 8 * X_STRIDE * 2)  # stages of 8 tiles, 8 rows


def tile_bytes(matrix: Matrix) -> int:
    """Bytes of a packed row tile, scales included."""
    per_column = {"nvfp4": 9, "fp8": 16, "f16": 32}[matrix.kind]
    return per_column * matrix.cols


def splits_for(rows: int, pages: int) -> int:
    """Splits of a sequence: enough blocks for the GPU, no more than half pages."""
    return max(1, min(2 * pages, 64, MAX_SPLIT_ROWS // rows))


@dataclass
class SlotState:
    """Per-slot device state that kernels read and advance."""

    token: Tensor
    position: Tensor
    temperature: Tensor
    seed: Tensor


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


def rope_table(config: Config, positions: int, device: torch.device) -> Tensor:
    """Cosines and sines [positions, rope_dim / 2, 2], angles formed in float64."""
    half = torch.arange(0, config.rope_dim, 2, dtype=torch.float64) / config.rope_dim
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * config.rope_theta**-half
    return torch.stack((angle.cos(), angle.sin()), -1).float().to(device)


def context_positions(cache: Cache) -> int:
    """Positions a slot can hold."""
    return cache.pages_per_slot * PAGE

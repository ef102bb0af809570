"""The decode step of one row: a program for one resident kernel, six or seven steps a layer.

Between its instructions activations travel as posts, a float32 (or two fp16) and a tag: see
kernels/producer.cuh. `stage` and `unstage` copy the plain buffers of a step to posts and back, for
the head of a prompt and for the operators one by one.
"""

import torch
from torch import Tensor

from . import arguments as c
from .arguments import fill
from .buffers import MAX_SPLIT_ROWS, PERSISTENT_SHARED, PERSISTENT_THREADS, TILE
from .formats import Matrix
from .steps import Launch, Step
from .weights import Layer

TAGS = 64  # a launch, as in kernels/producer.cuh


class Posts:
    """Memory between the instructions: [elements, 2] int32, value and tag; words of two fp16."""

    def __init__(self, step: "SingleStep") -> None:
        config, device = step.config, step.b.x.device
        make = lambda size: torch.zeros(size, 2, dtype=torch.int32, device=device)  # noqa: E731
        self.x_in, self.x_mid = make(config.hidden), make(config.hidden)
        self.y, self.ab, self.o = make(step.b.ld), make(step.b.ld_ab), make(config.value_width)
        self.mixed, self.router = make(config.value_width // 2), make(step.b.ld_router)
        self.h = make((config.top_k + 1) * config.expert_width // 2)
        self.parts = make(MAX_SPLIT_ROWS * config.heads * config.head_dim)
        self.stats = make(MAX_SPLIT_ROWS * config.heads * 2)

    def plain(self, b) -> list[tuple[Tensor, Tensor]]:
        """Each kind of post beside its plain buffer, seen as words."""
        words = lambda t: t.view(torch.int32).flatten()  # noqa: E731
        halves = lambda t: t.flatten()[: 2 * len(self.mixed)].view(torch.int32)  # noqa: E731
        return [
            (self.x_in, words(b.x[0])),
            (self.x_mid, words(b.x[0])),
            (self.y, words(b.y[0])),
            (self.ab, words(b.ab[0])),
            (self.o, words(b.o[0])),
            (self.mixed, halves(b.mixed)),
            (self.router, words(b.router[0])),
            (self.h, words(b.h)[: len(self.h)]),
        ]


class SingleStep(Step):
    """One row. Routing and norms are computed by every block that needs them."""

    def _build(self) -> None:
        if self.sms < self.config.hidden // TILE:
            raise ValueError(
                f"device: {self.sms} multiprocessors; one row needs {self.config.hidden // TILE}"
            )
        self.program: list[tuple[str, c.Instruction]] = []
        # Blocks that have finished; number of the launch: tags of no launch are zero.
        self.state = torch.tensor([0, 1], dtype=torch.int32, device=self.b.x.device)
        self.posts = Posts(self)
        self.tag = 0
        super()._build()

    @property
    def operators(self) -> set[str]:
        return super().operators | {name for name, _ in self.program}

    def _instruct(self, name: str, args) -> None:
        self.program.append((name, c.instruction(name, self.tag, args)))

    def launch_of(self, program: list[tuple[str, c.Instruction]]) -> Launch:
        """A launch of the resident kernel; it keeps the program's device memory alive."""
        raw = torch.frombuffer(bytearray(b"".join(bytes(i) for _, i in program)), dtype=torch.uint8)
        memory = raw.to(self.b.x.device)
        args = fill(
            c.PersistentArgs,
            program=memory,
            state=self.state,
            row_slot=self.b.row_slot,
            position=self.slots.position,
            count=len(program),
        )
        args.memory = memory
        return Launch("decode_one", (self.sms,), PERSISTENT_THREADS, args, PERSISTENT_SHARED)

    def single(self, *names: str) -> tuple[Launch, int]:
        """A launch of the first instructions of these names alone; the tag of what they read."""
        items = [next(item for item in self.program if item[0] == name) for name in names]
        before = names[0] in ("single_in", "single_head")
        return self.launch_of(items), items[0][1].tag - before

    def stage(self, tag: int, x_only: bool = False) -> None:
        """The plain buffers as posts that the next launch takes for its own."""
        tags = self.state[1] * TAGS + tag
        for posts, words in self.posts.plain(self.b)[: 1 if x_only else None]:
            posts[:, 0] = words
            posts[:, 1] = tags

    def unstage(self, name: str) -> None:
        """What an instruction posted, in the plain buffers."""
        x = 0 if name in ("single_down", "single_embed") else 1
        for posts, words in [*self.posts.plain(self.b)[2:], self.posts.plain(self.b)[x]]:
            words.copy_(posts[:, 0])

    def _linear(self, name: str, main: Matrix, second: Matrix | None, grid_main: int, **fields):
        args = fill(
            c.SingleArgs,
            weight=main.values,
            alpha=main.alpha,
            residual=self.b.x,
            tiles=main.rows // TILE,
            grid_main=grid_main,
            eps=self.config.rms_eps,
            **fields,
        )
        if second is not None:
            args.weight16, args.alpha16 = second.values.data_ptr(), second.alpha.data_ptr()
            args.tiles16 = second.rows // TILE
        self._instruct(name, args)

    def _embed(self) -> None:
        args = fill(
            c.SingleArgs,
            table=self.weights.embedding,
            token=self.slots.token,
            out=self.posts.x_in,
            residual=self.b.x,
        )
        self._instruct("single_embed", args)

    def _gdn(self, layer: Layer, index: int) -> None:
        p, mixer = self.posts, layer.mixer
        self.tag += 1
        into = {"into": p.x_in, "norm": layer.input_norm, "out": p.y, "out16": p.ab}
        grid = self.sms - mixer.ab.rows // TILE
        self._linear("single_in", mixer.in_proj, mixer.ab, grid, **into)
        args = self._delta_args(mixer, index)
        args.qkv, args.ab, args.o = (t.data_ptr() for t in (p.y, p.ab, p.o))
        self._instruct("single_delta", args)
        gate = {"into": p.o, "z": p.y[self.config.conv_width :], "norm": mixer.norm}
        self._linear("single_out_gated", mixer.out, None, self.sms, out=p.x_mid, **gate)

    def _attention(self, layer: Layer, index: int) -> None:
        p, mixer = self.posts, layer.mixer
        self.tag += 1
        into = {"into": p.x_in, "norm": layer.input_norm, "out": p.y}
        self._linear("single_in", mixer.qkv, None, self.sms, **into)
        splits = min(self.sms // self.config.kv_heads, MAX_SPLIT_ROWS)
        args = self._attention_args(mixer, index, splits)
        places = (p.y, p.parts, p.stats, p.mixed)
        args.qkv, args.parts, args.stats, args.out = (t.data_ptr() for t in places)
        self._instruct("single_attention", args)
        self._instruct("single_join", args)
        self._linear("single_out_raw", mixer.out, None, self.sms, into=p.mixed, out=p.x_mid)

    def _moe(self, index: int, layer: Layer) -> None:
        p, moe = self.posts, layer.moe
        into = {"into": p.x_mid, "norm": layer.post_norm}
        shared = moe.shared_gate_up
        own = p.h[self.config.top_k * self.config.expert_width // 2 :]
        grid = shared.rows // TILE
        self._linear("single_router", shared, moe.router, grid, out=own, out16=p.router, **into)
        self._linear("single_gate_up", moe.gate_up, None, self.sms, z=p.router, out=p.h, **into)
        down = fill(
            c.DownArgs,
            weight=moe.down.values,
            shared_weight=moe.shared_down.values,
            alpha=moe.down.alpha,
            shared_alpha=moe.shared_down.alpha,
            logits=p.router,
            h=p.h,
            out=p.x_in,
            residual=self.b.x,
        )
        self._instruct("single_down", down)

    def _head(self) -> None:
        self.tag += 1
        into = {"into": self.posts.x_in, "norm": self.weights.final_norm}
        head = self.weights.head
        self._linear("single_head", head, None, self.sms, logits=self.b.logits, **into)
        self.launches.append(self.launch_of(self.program))

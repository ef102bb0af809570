"""Kernels of the Qwen3.6 NVFP4 engine: a decode step of one stream, and one of 32.

The engine's own step is built on torch's `meta` device, which has shapes and no memory; its list
of launches says entry, grid, block and shared memory of each kernel. The one resident kernel of a
single row is shown operation by operation: compiled with the others left out, which changes
registers and instruction count of the whole, not the loops.
"""

from dataclasses import replace
from pathlib import Path

import torch

from . import arguments
from .buffers import Buffers, SlotState, defines, rope_table
from .cache import Cache
from .config import Config, read_config
from .cuda import SOURCES
from .formats import Matrix
from .single import SingleStep
from .steps import BatchedStep, Step
from .weights import Loader, Weights

META = torch.device("meta")
SMS, CONTEXT = 132, 1088
BITS = {"nvfp4": 4.5, "fp8": 8, "f16": 16}  # 4.5: a code and its share of a scale for 16 codes
LAYERS = ("linear_attention", "full_attention")
FILES = {
    "persistent.cu": ("single_",),
    "batched.cu": ("batched", "head"),
    "experts.cu": ("moe", "route", "combine"),
    "delta.cu": ("delta",),
    "attention.cu": ("attention",),
    "sampling.cu": ("embed", "pick"),
}  # fmt: skip
# Operations of the resident kernel of one row, in the order of its enum Op.
OPERATIONS = ("EMBED", "PROJECT", "DELTA", "OUT_GATED", "ATTEND", "JOIN", "OUT_RAW", "ROUTE",
              "GATE_UP", "DOWN", "HEAD")  # fmt: skip


class Shapes:
    """A source of tensors for the loader: shapes and dtypes alone."""

    def take(self, name: str, shape: tuple, dtypes: tuple = (torch.bfloat16,)) -> torch.Tensor:
        return torch.empty(shape, dtype=dtypes[0], device=META)

    def take_stack(self, names: list, shape: tuple, dtypes: tuple) -> torch.Tensor:
        return self.take("", (len(names), *shape), dtypes)

    def require(self, name: str) -> None:
        """Everything is there."""

    def finish(self) -> None:
        """Nothing is left over."""


class Operation:
    """An instruction in the place of a launch."""

    def __init__(self, name: str, launch) -> None:
        self.kernel, self.entry = name, launch.kernel
        self.grid, self.block, self.shared = launch.grid, launch.block, launch.shared
        self.defines = {"ONLY": OPERATIONS[arguments.OPERATIONS.index(name)]}


def kernels(config: Path) -> list[dict]:
    """See metainfer_lab/inspection/kernel.py; `config` is config.json or its folder."""
    full = read_config(config.parent if config.is_file() else config)
    short = replace(full, layer_types=LAYERS)
    weights = Loader(Shapes(), short, packed=True).load()
    return [
        fields
        for rows in (1, 32)
        for fields in _named(
            _launches(short, weights, rows), _uses(full, weights, rows), full, rows
        )
    ]


def _step(kind: type[Step], c: Config, weights: Weights, rows: int) -> Step:
    make = lambda dtype: torch.zeros(rows + 1, dtype=dtype, device=META)  # noqa: E731
    kinds = (torch.int64, torch.int64, torch.float32, torch.int64)
    cache = Cache(c, META, torch.bfloat16, rows, CONTEXT, None)
    slots, rope = SlotState(*map(make, kinds)), rope_table(c, CONTEXT, META)
    return kind(c, weights, cache, Buffers(c, META), slots, rope, rows, SMS)


def resident_step(c: Config, weights: Weights) -> SingleStep:
    """The step of one row."""
    return _step(SingleStep, c, weights, 1)


def _launches(c: Config, weights: Weights, rows: int) -> list:
    """Launches of a step of a model with one layer of each kind."""
    if rows > 1:
        return _step(BatchedStep, c, weights, rows).launches
    step = resident_step(c, weights)
    resident = next(launch for launch in step.launches if launch.kernel == "decode_one")
    return [Operation(name, resident) for name, _ in step.program]


def _uses(c: Config, weights: Weights, rows: int) -> dict[str, list[dict]]:
    """By the start of an entry's name: what its launches are, in the order of the step."""
    gdn, attention = (layer.mixer for layer in weights.layers)
    moe = weights.layers[0].moe
    touched = round(c.experts * (1 - (1 - c.top_k / c.experts) ** rows))
    counts = [c.layer_types.count(kind) for kind in LAYERS]
    all_layers = sum(counts)
    delta = {"name": "delta rule", "launches": counts[0], "naive": ("naive.py:delta_rule",)}
    state = rows * c.value_heads * c.key_dim * c.value_dim
    delta["other_bytes"] = 2 * 4 * state  # read and written, float32
    attend = {"name": "attention", "launches": counts[1], "naive": ("naive.py:attention",)}
    attend["other_bytes"] = 2 * 2 * rows * CONTEXT * c.kv_heads * c.head_dim
    attend["other_operations"] = 4 * rows * CONTEXT * c.heads * c.head_dim
    into = [_use("GDN in", gdn.in_proj, counts[0]), _use("attention in", attention.qkv, counts[1])]
    out = [_use("GDN out", gdn.out, counts[0]), _use("attention out", attention.out, counts[1])]
    shared = _use("shared gate/up, router", moe.shared_gate_up, all_layers)
    shared["other_bytes"] = 2 * moe.router.rows * moe.router.cols
    down = _use("experts down", moe.down, all_layers, touched + 1)
    return {
        "single_in": into,
        "batched_in": into[:1],
        "batched_qkv": into[1:],
        "single_delta": [delta],
        "delta": [delta],
        "single_out_gated": out[:1],
        "single_out_raw": out[1:],
        "batched_out": out,
        "single_join": [{"name": "attention join", "launches": counts[1]}],
        "single_attention": [attend],
        "attention_join": [{"name": "attention join", "launches": counts[1]}],
        "attention": [attend],
        "single_router": [shared],
        "batched_router": [shared],
        "single_gate_up": [_use("experts gate/up", moe.gate_up, all_layers, touched)],
        "moe_gate_up": [_use("experts gate/up", moe.gate_up, all_layers, touched)],
        "single_down": [down],
        "moe_down": [down],
        "single_head": [_use("head", weights.head, 1)],
        "head": [_use("head", weights.head, 1)],
    }


def _use(name: str, matrix: Matrix, launches: int, copies: int = 1) -> dict:
    size = copies * matrix.rows * matrix.cols
    return {
        "name": name,
        "weights": size,
        "weight_bits": BITS[matrix.kind],
        "launches": launches,
        "naive": ("naive.py:linear", "formats.py:decode"),
    }


def _named(launches: list, uses: dict[str, list[dict]], c: Config, rows: int) -> list[dict]:
    """The launches that have a use, each once: those of the second layer's experts repeat."""
    left = {start: list(found) for start, found in uses.items()}
    named = []
    for launch in launches:
        start = next((s for s in left if launch.kernel.startswith(s) and left[s]), None)
        if start is None:
            continue
        use = left[start].pop(0)
        grid = 1
        for size in launch.grid:
            grid *= size
        file = next(f for f, starts in FILES.items() if launch.kernel.startswith(starts))
        named.append({
            "files": tuple(f"kernels/{part}" for part in SOURCES[file]),
            "options": ("-default-device",),
            "defines": defines(c) | getattr(launch, "defines", {}),
            "entry": getattr(launch, "entry", launch.kernel), "grid": grid, "block": launch.block,
            "shared_bytes": launch.shared, "tokens": rows, **use,
            "name": use["name"] if rows == 1 else f"{use['name']}, {rows} rows",
            "column_tiles": -(-rows // 8) if launch.kernel.startswith(("batched", "head")) else 1,
        })  # fmt: skip
    return named

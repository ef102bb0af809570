"""Kernels of one of two ranks: decode steps of one stream and of 32, a chunk of prefill.

Its launching functions run on torch's `meta` device, which has shapes and no memory, with every
kernel replaced by a recorder; what they would have launched is what is declared.
"""

from math import prod
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from .config import PAGE, ModelConfig
from .group import Group
from .kernels import attention, prefill, rows, skinny

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
TYPES = {BF16: "*bf16", F32: "*fp32", I32: "*i32", I64: "*i64"}
CONTEXT, CHUNK = 1088, 1024
BUILD = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")
PAIR = Group(0, 2)
PAIR.exchange = SimpleNamespace(next=lambda: 0, bytes_per_rank=0, peers=None, control=None)
found: list[dict] = []


class Cuda:
    """Stands in for the engine's CudaKernel."""

    def __init__(self, source, name, defines, threads, shared_bytes, cluster):
        files = ("kernels/common.cuh", f"kernels/{source}")
        self.fields = {"files": files, "entry": name, "defines": defines, "block": threads,
                       "shared_bytes": shared_bytes}  # fmt: skip

    def __call__(self, grid, *arguments):
        found.append(self.fields | {"grid": prod(grid)})


class Jit:
    """Stands in for a @triton.jit function of a module."""

    def __init__(self, function, module):
        self.function, self.file = function, f"kernels/{Path(module.__file__).name}"

    def __getitem__(self, grid):
        return lambda *values, **options: self._record(grid, values, options)

    def _record(self, grid, values, options):
        given = dict(zip(self.function.arg_names, values, strict=False))
        given |= {name: value for name, value in options.items() if name not in BUILD}
        fixed = {self.function.arg_names[place] for place in self.function.constexprs}
        found.append({
            "language": "triton", "files": (self.file,), "entry": self.function.__name__,
            "arguments": {n: _type(v) for n, v in given.items() if n not in fixed},
            "constants": {n: v for n, v in given.items() if n in fixed},
            "options": {n: v for n, v in options.items() if n in BUILD and n != "num_warps"},
            "grid": prod(grid), "block": 32 * options.get("num_warps", 4),
        })  # fmt: skip


def _type(value):
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype][1:]}{value.block_shape}>"
    return "fp32" if isinstance(value, float) else value


def _replace_kernels() -> None:
    attention.CudaKernel = skinny.CudaKernel = Cuda
    for module in (rows, prefill):
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.JITFunction) and name.endswith("_kernel"):
                setattr(module, name, Jit(value, module))


def _empty(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def kernels(config: Path) -> list[dict]:
    """See metainfer_lab/inspection/kernel.py; `config` is config.json or its folder."""
    whole = ModelConfig.from_folder(config.parent if config.is_file() else config)
    c = whole.shard(PAIR.world)
    _replace_kernels()
    declared = [fields for tokens in (1, 32) for fields in _decode(c, tokens)]
    return declared + list(_prefill(c))


def _launched(call, arguments, **use):
    """The one kernel that a call launched, with what is said of its use."""
    found.clear()
    call(*arguments)
    (launch,) = found
    return launch | use | {"naive": (f"naive.py:{call.__name__}",)}


def _decode(c: ModelConfig, tokens: int):
    h, layers, eps = c.hidden_size, c.num_hidden_layers, 1e-6
    heads = c.num_attention_heads * c.head_dim
    suffix = "" if tokens == 1 else f", {tokens} rows"
    squares = _empty(tokens, h // skinny.SLOT, dtype=F32)
    residual = (_empty(tokens, h, dtype=F32), _empty(h))
    products = (
        ("QKV", skinny.scaled_product, c.qkv_size, h, layers),
        ("attention out", skinny.residual_product, h, heads, layers),
        ("MLP gate/up", skinny.gate_up_product, 2 * c.intermediate_size, h, layers),
        ("MLP down", skinny.residual_product, h, c.intermediate_size, layers),
        ("head", skinny.scaled_product, c.vocab_size // PAIR.world, h, 1),
    )
    for name, call, outputs, inputs, launches in products:
        weight, x = _empty(outputs, inputs), _empty(tokens, inputs)
        scaled = (x, squares, weight, eps)
        arguments = (x, weight, *residual, PAIR) if call is skinny.residual_product else scaled
        yield _launched(
            call, arguments, name=name + suffix, weights=outputs * inputs, launches=launches,
            tokens=tokens, column_tiles=-(-tokens // 8))  # fmt: skip
    kv = 2 * 2 * tokens * CONTEXT * c.num_key_value_heads * c.head_dim
    yield _launched(
        attention.decode_attention, (_empty(tokens, c.qkv_size, dtype=F32), *_heads(c, tokens)),
        name="decode attention" + suffix, launches=layers, tokens=tokens, other_bytes=kv,
        other_operations=4 * tokens * CONTEXT * heads)  # fmt: skip


def _heads(c: ModelConfig, sequences: int):
    """q_norm, k_norm, rope, caches, table, positions, eps."""
    pages = -(-CONTEXT // PAGE)
    cache = (sequences * pages + 1, c.num_key_value_heads, PAGE, c.head_dim)
    rope = tuple(_empty(CONTEXT, c.head_dim // 2, dtype=F32) for _ in range(2))
    table = _empty(sequences, pages, dtype=I32)
    norms = (_empty(c.head_dim), _empty(c.head_dim))
    return *norms, rope, _empty(*cache), _empty(*cache), table, _empty(sequences, dtype=I32), 1e-6


def _prefill(c: ModelConfig):
    h, layers = c.hidden_size, c.num_hidden_layers
    q_norm, k_norm, rope, keys, values, table, one, eps = _heads(c, 1)
    wide, query = _empty(CHUNK, c.qkv_size), _empty(CHUNK, c.num_attention_heads * c.head_dim)
    yield _launched(
        rows.add_norm,
        (_empty(CHUNK, h, dtype=F32), _empty(CHUNK, h), _empty(h), eps),
        name="add, norm",
        launches=2 * layers,
        other_bytes=CHUNK * h * (4 + 4 + 2 + 2),
    )
    yield _launched(
        rows.silu_multiply,
        (_empty(CHUNK, 2 * c.intermediate_size),),
        name="SiLU, multiply",
        launches=layers,
        other_bytes=3 * 2 * CHUNK * c.intermediate_size,
    )
    yield _launched(
        prefill.rotate_and_store,
        (wide, q_norm, k_norm, rope, keys, values, table, one, one, eps),
        name="rotate, store",
        launches=layers,
        other_bytes=2 * 2 * CHUNK * c.qkv_size,
    )
    yield _launched(
        prefill.prefill_attention,
        (query, keys, values, table, one, one),
        name="prefill attention",
        other_operations=4 * CHUNK * CHUNK // 2 * query.shape[1],
        launches=layers,
        other_bytes=2 * (2 * query.numel() + 2 * CHUNK * c.num_key_value_heads * c.head_dim),
    )

"""The argument structs of the kernels, field for field as in kernels/*.cu."""

import ctypes


def _struct(name: str, pointers: str, longs: str = "", ints: str = "", floats: str = "") -> type:
    """A ctypes struct whose C twin lists pointers, then 64-bit, 32-bit and float fields."""
    kinds = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_float)
    groups = (pointers, longs, ints, floats)
    fields = [(f, kind) for kind, group in zip(kinds, groups, strict=True) for f in group.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def fill(kind: type, **values) -> ctypes.Structure:
    """A struct with tensors given as their addresses; fields left out are zero."""
    unknown = set(values) - {name for name, _ in kind._fields_}
    assert not unknown, f"{kind.__name__} has no {unknown}"
    args = kind()
    for name, value in values.items():
        setattr(args, name, value.data_ptr() if hasattr(value, "data_ptr") else value)
    return args


OPERATIONS = (
    "single_embed",
    "single_in",
    "single_delta",
    "single_out_gated",
    "single_attention",
    "single_join",
    "single_out_raw",
    "single_router",
    "single_gate_up",
    "single_down",
    "single_head",
)  # in the order of enum Op


class Body(ctypes.Union):
    """What an instruction of the resident kernel works on."""


class Instruction(ctypes.Structure):
    """One instruction; `tag` counts layers from 1 (see kernels/producer.cuh)."""


SingleArgs = _struct(
    "SingleArgs",
    "weight alpha weight16 alpha16 into norm z out out16 residual logits table token",
    ints="tiles tiles16 grid_main",
    floats="eps",
)
DownArgs = _struct("DownArgs", "weight shared_weight alpha shared_alpha logits h out residual")
PersistentArgs = _struct("PersistentArgs", "program state row_slot position", ints="count")
BatchArgs = _struct(
    "BatchArgs",
    "weight alpha weight16 alpha16 x y y16 h",
    ints="tiles tiles16 blocks_main ld ld16",
)
RouteArgs = _struct(
    "RouteArgs", "logits row_slot weights units members touched_sum", ints="rows scratch"
)
MoeArgs = _struct(
    "MoeArgs",
    "weight alpha shared_weight shared_alpha units members x h out",
    ints="rows block_stride row_stride",
)
NormArgs = _struct(
    "NormArgs",
    "x parts weights sums norm row_slot xn",
    ints="scratch block_stride row_stride",
    floats="eps",
)
DeltaArgs = _struct(
    "DeltaArgs",
    "qkv ab conv a_log dt_bias norm row_slot position ring state o gated",
    ints="rows ld ld_ab",
    floats="eps",
)
ChunkArgs = _struct(
    "ChunkArgs",
    "y alpha conv a_log dt_bias norm ring state q k v gates sums w p u o gated where",
    ints="padded ld",
    floats="eps",
)
PromptNormArgs = _struct("PromptNormArgs", "x add alpha parts weights norm xn", floats="eps")
PromptHeadsArgs = _struct(
    "PromptHeadsArgs",
    "y alpha q_norm k_norm rope page_table pages q k v mixed gated where",
    ints="rows ld pages_per_slot",
    floats="eps",
)
PromptRouteArgs = _struct(
    "PromptRouteArgs", "y alpha ids weights shared members counts units", ints="rows ld"
)
PromptMoeArgs = _struct("PromptMoeArgs", "weight alpha units members x out")
AttentionArgs = _struct(
    "AttentionArgs",
    "qkv q_norm k_norm rope row_slot position page_table pages parts stats out",
    ints="ld pages_per_slot splits",
    floats="eps",
)
EmbedArgs = _struct("EmbedArgs", "table row_slot token x")
PickArgs = _struct(
    "PickArgs",
    "logits model_logits row_slot token position temperature seed parts out_token out_logprob",
    ints="advance scratch",
)

Body._fields_ = [
    ("single", SingleArgs),
    ("down", DownArgs),
    ("delta", DeltaArgs),
    ("attention", AttentionArgs),
]
Instruction._fields_ = [
    ("op", ctypes.c_int),
    ("tag", ctypes.c_uint),
    ("body", Body),
]


def instruction(name: str, tag: int, args: ctypes.Structure) -> Instruction:
    """An instruction of the resident kernel from its operation's arguments."""
    made = Instruction(op=OPERATIONS.index(name), tag=tag)
    ctypes.memmove(ctypes.byref(made.body), ctypes.byref(args), ctypes.sizeof(args))
    return made

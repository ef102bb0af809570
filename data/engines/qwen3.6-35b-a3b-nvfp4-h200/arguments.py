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


SingleArgs = _struct(
    "SingleArgs",
    "weight alpha weight16 alpha16 x norm z half_x y y16 h",
    ints="tiles grid_main",
    floats="eps",
)
ExpertArgs = _struct(
    "ExpertArgs",
    "weight alpha shared_weight shared_alpha logits norm x h",
    floats="eps",
)
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
PrefillArgs = _struct(
    "PrefillArgs",
    "qkv ab conv a_log dt_bias ring state mixed gates o where",
    ints="ld ld_ab",
)
AttentionArgs = _struct(
    "AttentionArgs",
    "qkv q_norm k_norm rope row_slot position page_table pages parts stats out",
    ints="ld pages_per_slot splits batched",
    floats="eps",
)
EmbedArgs = _struct("EmbedArgs", "table row_slot token x")
PickArgs = _struct(
    "PickArgs",
    "logits model_logits row_slot token position temperature seed parts out_token out_logprob",
    ints="advance scratch",
)

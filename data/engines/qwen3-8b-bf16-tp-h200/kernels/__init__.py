"""The kernels of each operator, for sm_90a and later."""

from .attention import decode_attention
from .greedy import greedy
from .prefill import prefill_attention, rotate_and_store
from .rows import add_norm, silu_multiply, weigh_rows
from .skinny import gate_up_product, residual_product, scaled_product

__all__ = [
    "add_norm",
    "decode_attention",
    "gate_up_product",
    "greedy",
    "prefill_attention",
    "residual_product",
    "rotate_and_store",
    "scaled_product",
    "silu_multiply",
    "weigh_rows",
]

"""Checks of plain values that callers and files hand in."""

import math
from numbers import Integral, Real


def is_int(value: object) -> bool:
    """Whether value is an integer of any kind (numpy's too); a bool is not a number."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether value is a finite real number within float64; a bool is not a number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def check_ids(name: str, ids: object, vocab_size: int) -> list[int]:
    """Copy a list of token ids; ValueError naming `name` unless each is in [0, vocab_size)."""
    if isinstance(ids, str | bytes | dict) or not hasattr(ids, "__iter__"):
        raise ValueError(f"{name} must be a list of token ids")
    copied = list(ids)
    for token in copied:
        if not is_int(token) or not 0 <= token < vocab_size:
            raise ValueError(f"{name} holds {token!r}, no id within [0, {vocab_size})")
    return [int(token) for token in copied]

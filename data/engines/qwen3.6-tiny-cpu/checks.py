"""Checks of arguments: each raises a ValueError that names the argument at fault."""

import math
from collections.abc import Iterable
from numbers import Integral, Real


def integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """`value` as an int within low..high (both included, high None: open); a bool is no number."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an integer, not {value!r:.60}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} is out of range, {low} to {'any' if high is None else high}")
    return int(value)


def number(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> float:
    """`value` as a finite float within low..high (both included); a bool is no number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, not {value!r:.60}")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result) or not low <= result <= high:
        raise ValueError(f"{name} must be finite and within {low} to {high}, not {result}")
    return result


def boolean(name: str, value: object) -> bool:
    """`value`, which must be True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r:.60}")
    return value


def integers(name: str, values: object, bound: int) -> list[int]:
    """`values` as a new list of ints within [0, bound)."""
    if isinstance(values, (str, bytes, dict)) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list of integers")
    return [integer(name, value, 0, bound - 1) for value in values]

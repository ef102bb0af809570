"""Checks that several modules share: what counts as an integer, a number, a list of ids."""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return value as an int in [low, high]; ValueError naming `name` otherwise (bools too)."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {bound}, not {value}")
    return int(value)


def number(name: str, value: Any) -> float:
    """Return value as a finite float; ValueError naming `name` otherwise (bools too)."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{name} must be a number, not {value!r}")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise ValueError(f"{name} must be finite")
    return result


def id_list(name: str, values: Any, limit: int) -> list[int]:
    """Copy an iterable of integers in [0, limit); ValueError naming `name` otherwise."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise ValueError(f"{name} must be a list of integers, not {values!r}")
    return [integer(name, value, 0, limit - 1) for value in values]


def filled_id_list(name: str, values: Any, limit: int) -> list[int]:
    """As id_list, and an empty list is a ValueError too."""
    result = id_list(name, values, limit)
    if not result:
        raise ValueError(f"{name} must not be empty")
    return result

"""Checks of values that come from outside; every refusal names the argument at fault.

The refused value itself stays out of the text: it may be huge, and a tensor or an integer of many
digits cannot always be printed.
"""

import json
import math
from collections.abc import Iterable
from numbers import Integral, Real
from pathlib import Path


def integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """`value` as an int in [low, high]; a bool is no number. ValueError names `name`."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name} must be {bound}")
    return int(value)


def number(name: str, value: object, low: float, high: float = math.inf) -> float:
    """`value` as a finite float in [low, high]; a bool is no number. ValueError names `name`."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{name} must be a number")
    try:
        converted = float(value)
    except OverflowError:
        converted = math.inf
    if not math.isfinite(converted) or not low <= converted <= high:
        raise ValueError(f"{name} must be a finite number in [{low}, {high}]")
    return converted


def boolean(name: str, value: object) -> bool:
    """`value` as a bool. ValueError names `name`."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false")
    return value


def integers(name: str, values: object, limit: int) -> list[int]:
    """A new list of `values`, each an integer in [0, limit). ValueError names `name`."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | dict):
        raise ValueError(f"{name} must be a list of integers")
    return [integer(name, value, 0, limit - 1) for value in values]


def json_object(path: Path) -> dict:
    """The JSON object in a file. ValueError names the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} must hold a JSON object")
    return found

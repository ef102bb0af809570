"""Rounding of what passes between modules: what a number format costs, shown by the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from metainfer_lab.oracle import Rounding


def round_symmetric(x: torch.Tensor) -> torch.Tensor:
    """x rounded to multiples of max|x| / 127 of its row."""
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / scale).round() * scale


def round_asymmetric(x: torch.Tensor) -> torch.Tensor:
    """x rounded to 256 levels from its row's least value (0 at most) to its greatest."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low).clamp(min=1e-30) / 255
    zero = (-low / scale).round()
    return (((x / scale).round() + zero).clamp(0, 255) - zero) * scale


def round_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """x rounded to bfloat16, in the dtype that it had."""
    return x.bfloat16().to(x.dtype)


ROUND: dict[Rounding, Callable[[torch.Tensor], torch.Tensor]] = {
    "symmetric": round_symmetric,
    "asymmetric": round_asymmetric,
    "bfloat16": round_bfloat16,
}


def is_wide(x: Any) -> bool:
    """Whether a module's argument is a tensor of floats."""
    return isinstance(x, torch.Tensor) and x.is_floating_point()

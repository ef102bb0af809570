"""A plain engine for the Qwen3.5/3.6 hybrid: Gated DeltaNet, gated attention, experts."""

from .engine import Engine, load
from .operators import OPERATORS, Operator

__all__ = ["OPERATORS", "Engine", "Operator", "load"]

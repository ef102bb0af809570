"""Qwen3-8B in bfloat16 on one H200; see README.md."""

from .engine import Engine, load
from .operators import OPERATORS, Operator

__all__ = ["OPERATORS", "Engine", "Operator", "load"]

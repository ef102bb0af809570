"""Qwen3-8B in bfloat16 on one H200."""

from .operators import OPERATORS, Operator

__all__ = ["OPERATORS", "Operator"]

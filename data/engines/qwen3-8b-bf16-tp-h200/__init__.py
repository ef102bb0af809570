"""Qwen3-8B in bfloat16, tensor parallel on two or four H200s; see README.md."""

from .engine import Engine, load
from .group import LostRank
from .operators import OPERATORS, Operator

__all__ = ["OPERATORS", "Engine", "LostRank", "Operator", "load"]

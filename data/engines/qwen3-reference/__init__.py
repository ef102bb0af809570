"""A plain engine for dense Llama and Qwen3 checkpoints."""

from .engine import Engine, load
from .operators import OPERATORS, Operator

__all__ = ["OPERATORS", "Engine", "Operator", "load"]

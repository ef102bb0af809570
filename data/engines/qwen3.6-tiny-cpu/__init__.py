"""Inference engine for qwen3_5_moe text models (hybrid, mixture of experts) on a CPU, float32."""

from .engine import load
from .operators import OPERATORS

__all__ = ["OPERATORS", "load"]

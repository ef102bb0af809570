"""Inference engine for the Qwen3.6 family (gated DeltaNet, gated attention, experts) on a CPU."""

from .engine import load
from .operators import OPERATORS

__all__ = ["OPERATORS", "load"]

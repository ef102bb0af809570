"""Inference engine for dense Qwen3 models on a CPU, in float32, with continuous batching."""

from .engine import load

__all__ = ["load"]

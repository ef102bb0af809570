"""Inference engine for dense Qwen3 models on a CPU in float32."""

from .engine import Engine, load

__all__ = ["Engine", "load"]

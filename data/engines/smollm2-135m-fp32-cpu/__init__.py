"""Inference engine for dense Llama-like decoders on a CPU in float32."""

from .engine import load

__all__ = ["load"]

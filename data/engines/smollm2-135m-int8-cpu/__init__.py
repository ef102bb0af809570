"""Int8 CPU inference of dense Llama-type decoders such as SmolLM2."""

from .engine import Engine, load

__all__ = ["Engine", "load"]

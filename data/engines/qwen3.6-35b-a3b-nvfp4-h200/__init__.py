"""Qwen3.6-35B-A3B, NVIDIA's NVFP4 / FP8 mix, on one H200: a whole inference engine."""

from pathlib import Path

import torch

from .cache import Cache
from .checkpoint import Checkpoint
from .config import read_config
from .naive_runner import NaiveRunner
from .operators import OPERATORS as STEP_OPERATORS
from .prompt_operators import PROMPT_OPERATORS
from .scheduler import Engine
from .weights import Loader

__all__ = ["OPERATORS", "build", "load"]

OPERATORS = STEP_OPERATORS | PROMPT_OPERATORS


def load(
    checkpoint: str | Path,
    *,
    device: str,
    max_batch: int,
    max_context: int,
    cache_bytes: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> Engine:
    """Open a ModelOpt checkpoint folder.

    device: "cuda" binds the kernels, anything else the naive operators in float32. cache_bytes
    bounds keys, values and states together. ValueError names the argument or tensor at fault.
    """
    config = read_config(Path(checkpoint))
    for name, value in (("max_batch", max_batch), ("max_context", max_context)):
        if value < 1:
            raise ValueError(f"{name}: {value} must be at least 1")
    if (rank, world) != (0, 1):
        raise ValueError(f"world: {world} ranks asked for; this engine runs on one GPU")
    if max_context > config.max_positions:
        raise ValueError(f"max_context: {max_context} exceeds the model's {config.max_positions}")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: {device!r} is none that torch knows") from error
    source = Checkpoint(Path(checkpoint), target)
    return build(config, source, target, max_batch, max_context, cache_bytes)


def build(config, source, device, max_batch: int, max_context: int, cache_bytes=None) -> Engine:
    """Assemble an engine from any source of tensors with take(), take_stack() and finish()."""
    cuda = device.type == "cuda"
    with torch.inference_mode():
        weights = Loader(source, config, packed=cuda).load()
        dtype = torch.bfloat16 if cuda else torch.float32
        cache = Cache(config, device, dtype, max_batch, max_context, cache_bytes)
        if cuda:
            from .cuda_runner import CudaRunner

            return Engine(config, cache, CudaRunner(config, weights, cache), max_context)
        return Engine(config, cache, NaiveRunner(config, weights, cache, dtype), max_context)

"""Held-out text that every machine has: passages of the standard library's documentation."""

from __future__ import annotations

import inspect
import pkgutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from metainfer_lab.text import Tokenizer

LEAST_CHARACTERS = 8_000


def excerpts(
    checkpoint: Path, rng: np.random.Generator, count: int, tokens: int
) -> list[list[int]]:
    """Token ids of passages drawn from the sources of the standard library."""
    tokenizer = Tokenizer.open(checkpoint)
    return [tokenizer.encode(_passage(rng))[:tokens] for _ in range(count)]


def _passage(rng: np.random.Generator) -> str:
    names = [m.name for m in pkgutil.iter_modules([str(Path(inspect.__file__).parent)])]
    while True:
        name = names[int(rng.integers(len(names)))]
        found = find_spec(name)
        if found is None or not (found.origin or "").endswith(".py"):
            continue
        text = Path(found.origin).read_text(errors="ignore")
        if len(text) >= LEAST_CHARACTERS:
            start = int(rng.integers(len(text) - LEAST_CHARACTERS // 2))
            return text[start : start + LEAST_CHARACTERS // 2]

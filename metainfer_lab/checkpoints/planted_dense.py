"""A dense checkpoint whose greedy text is known (see `planted`): a token is two digits.

The next token's row is a permutation of this token's row, computed by the MLP with a neuron for
each row; its tail is a permutation of the tail of the token LOOK_BACK positions ago.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from metainfer_lab.checkpoints import planted, tiny
from metainfer_lab.checkpoints.planted import OPEN, Planted
from metainfer_lab.model import ModelDims

if TYPE_CHECKING:
    import torch

SIZES = ROWS, TAILS = 10, 6
# Attention first: without norms of its own, its scores want inputs of one size.
ATTENTION_LAYER, MLP_LAYER = 0, 1


def planted_dense(
    seed: int,
    folder: Path,
    like: ModelDims,
    *,
    dtype: str = "float32",
    granules: Mapping[str, int] | None = None,
) -> Planted:
    """Write the checkpoint: 60 tokens, two layers, other dimensions drawn within `granules`."""
    rng, granules = np.random.default_rng(seed), dict(granules or {})
    fixed = {"rope_theta": 1e4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    fixed["head_dim"] = math.lcm(granules.get("head_dim", 1), 32)  # 16 rotary pairs and more
    fixed["vocab_size"] = math.lcm(granules.get("vocab_size", 1), math.prod(SIZES))
    drawn = tiny.draw_dims(rng, like, granules, num_hidden_layers=2, **fixed)
    permutations = tuple(planted.cycle(size, rng) for size in SIZES)

    def plant(dims: ModelDims, tensors: planted.Tensors) -> None:
        planted.quieten(tensors, 1.0)
        Planter(dims, tensors, centred=False).plant(permutations, rng)

    tiny.tiny_checkpoint(like.family, seed, folder, dtype=dtype, edit=plant, **drawn)
    return Planted(folder, SIZES, permutations, ("the MLP", "attention"))


class Planter(planted.Planter):
    """Adds the MLP."""

    def plant(self, permutations: tuple[np.ndarray, ...], rng: np.random.Generator) -> None:
        """Write all parts. Tokens beyond the planted ones are never said."""
        sizes = (ROWS, TAILS, ROWS, TAILS, 1)
        made = planted.directions(self.dims.hidden_size, sizes, rng)
        row, tail, next_row, next_tail, always = made
        count = math.prod(SIZES)
        rows, tails = np.unravel_index(np.arange(count), SIZES)
        self.at("embed_tokens.weight")[:count] = row[rows] + tail[tails] + always
        head = self.tensors["lm_head.weight"]
        head.zero_()
        head[:count] = 5 * self.unweigh("norm", next_row[rows] + next_tail[tails])
        self.look_back(ATTENTION_LAYER, always[0], tail, next_tail[permutations[1]], parts=3)
        self._mlp(row, always, next_row[permutations[0]])

    def _mlp(self, row: torch.Tensor, always: torch.Tensor, written: torch.Tensor) -> None:
        """Neuron r opens for row r alone, and writes the permuted row."""
        norm, block = f"layers.{MLP_LAYER}.post_attention_layernorm", f"layers.{MLP_LAYER}.mlp."
        row, always = self.unweigh(norm, row), self.unweigh(norm, always)
        gate, up, down = (self.at(f"{block}{name}_proj.weight") for name in ("gate", "up", "down"))
        size = math.sqrt(self.dims.hidden_size / 4)  # of a part, after the norm
        gate[:ROWS] = OPEN / size * (row - always / 2)
        up[:ROWS] = always / size
        down[:, :ROWS] = 2 / OPEN * written.T

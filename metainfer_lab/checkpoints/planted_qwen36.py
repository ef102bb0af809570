"""A Qwen3.6 checkpoint whose greedy text is known (see `planted`): a token is three digits.

The next token's
  row    is a permutation of this token's row, computed by the experts: expert r is chosen by row r;
  column is a permutation of what a DeltaNet state holds: the column of the token before the last
         one whose row was 0 (the convolution looks one token back; beta is one there, else zero);
  tail   is a permutation of the tail of the token LOOK_BACK positions ago.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from metainfer_lab.checkpoints import draws, modelopt, planted
from metainfer_lab.checkpoints.planted import NOISE, OPEN, Planted
from metainfer_lab.checkpoints.tiny_qwen36 import (
    Calibrator,
    calibrate,
    draw_tensors,
    tiny_config,
    write,
)
from metainfer_lab.model import ModelDims

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

SIZES = ROWS, COLUMNS, TAILS = 8, 5, 5
VOCAB = ROWS * COLUMNS * TAILS
PARTS = ("an expert", "the recurrent state", "attention")
STATE_LAYER, EXPERT_LAYER, ATTENTION_LAYER = 0, 1, 3


class Codes(NamedTuple):
    """Orthonormal directions [n, hidden] of the residual stream: a token's digits, what each part
    writes, and one that every token has."""

    row: torch.Tensor
    column: torch.Tensor
    tail: torch.Tensor
    next_row: torch.Tensor
    next_column: torch.Tensor
    next_tail: torch.Tensor
    always: torch.Tensor
    permutations: tuple[np.ndarray, np.ndarray, np.ndarray]


def planted_qwen36(
    seed: int,
    folder: Path,
    *,
    quantised: bool = False,
    wrapped: bool = False,
    oracle: Calibrator | None = None,
    granules: Mapping[str, int] | None = None,
) -> Planted:
    """Write the checkpoint: 200 tokens, four layers, other dimensions drawn within `granules`."""
    import torch

    rng, granules = np.random.default_rng(seed), dict(granules or {})
    fixed = {"vocab_size": VOCAB, "num_hidden_layers": 4, "rope_theta": 1e4, "rms_norm_eps": 1e-6}
    fixed["head_dim"] = math.lcm(granules.get("head_dim", 1), 32)  # four rotary pairs and more
    text = draws.draw_dims(rng, granules, quantised=quantised, **fixed)
    config = tiny_config(text, wrapped=wrapped or quantised)
    dims, tensors = ModelDims.from_config(config), draw_tensors(config, seed)
    codes = _codes(dims.hidden_size, rng)
    planted.quieten(tensors, 0.0)
    model = Planter(dims, tensors, codes)
    model.tokens()
    model.state()
    model.experts()
    written = codes.next_tail[codes.permutations[2]]
    model.look_back(ATTENTION_LAYER, codes.always[0], codes.tail, written, parts=7)
    if not quantised:
        write(folder, config, tensors, shards=1)
        return Planted(folder, SIZES, codes.permutations, PARTS)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    amax = calibrate(config, tensors, rng, oracle)
    packed = modelopt.quantise(tensors, dims, amax, rng, shifts=(0, 4, 8))
    write(folder, modelopt.quantised_config(config), packed, shards=1)
    return Planted(folder, SIZES, codes.permutations, PARTS)


def _codes(hidden: int, rng: np.random.Generator) -> Codes:
    sizes = (ROWS, COLUMNS, TAILS, ROWS, COLUMNS, TAILS, 1)
    made = planted.directions(hidden, sizes, rng)
    return Codes(*made, permutations=tuple(planted.cycle(size, rng) for size in SIZES))


class Planter(planted.Planter):
    """Adds the parts that this family has."""

    def __init__(self, dims: ModelDims, tensors: Tensors, codes: Codes):
        super().__init__(dims, tensors, centred=True)
        self.codes = codes

    def tokens(self) -> None:
        """Embedding: a token's digits. Head: its row, column and tail as the parts wrote them."""
        import torch

        c = self.codes
        row, column, tail = np.unravel_index(np.arange(VOCAB), SIZES)
        digits = c.row[row] + c.column[column] + c.tail[tail] + c.always
        self.tensors[f"{self.prefix}embed_tokens.weight"] = digits
        # Column 0 stands for an empty state at half a column's strength, so columns count more.
        default = 0.5 * torch.from_numpy(column == 0)[:, None] * c.always
        columns = c.next_column[column] + default
        written = 5 * c.next_row[row] + 7 * columns + 3 * c.next_tail[tail]
        self.tensors["lm_head.weight"] = self.unweigh("norm", written)

    def state(self) -> None:
        """Value head 0 of the first DeltaNet keeps a column, one-hot, under one constant key."""
        gdn, c = self.dims.gdn, self.codes
        layer, block = f"layers.{STATE_LAYER}.input_layernorm", f"layers.{STATE_LAYER}.linear_attn."
        keys = gdn.num_key_heads * gdn.key_head_dim
        always, column = self.unweigh(layer, c.always)[0], self.unweigh(layer, c.column)
        marker = self.unweigh(layer, c.row[:1])[0]
        qkv, taps = self.at(block + "in_proj_qkv.weight"), self.at(block + "conv1d.weight")
        for first, size in ((0, gdn.key_head_dim), (keys, gdn.key_head_dim)):
            qkv[first : first + size], taps[first : first + size] = 0, 0
            qkv[first], taps[first, 0, -1] = OPEN * always, 1
        values = slice(2 * keys, 2 * keys + gdn.value_head_dim)
        qkv[values], taps[values] = 0, 0
        qkv[2 * keys : 2 * keys + COLUMNS] = OPEN * column
        taps[values, 0, -2] = 1  # the token before
        self.at(block + "in_proj_b.weight")[0] = 2 * OPEN * marker - OPEN * always
        self.at(block + "in_proj_a.weight")[0] = 0
        self.at(block + "A_log")[0] = -12.0
        self.at(block + "in_proj_z.weight")[: gdn.value_head_dim] = OPEN * always
        out, norm = self.at(block + "out_proj.weight"), self.at(block + "norm.weight")
        size = OPEN * math.sqrt(self.dims.hidden_size) / 2 * math.sqrt(gdn.value_head_dim)
        out[:, : gdn.value_head_dim] = 0
        written = c.next_column[c.permutations[1]].T / norm[:COLUMNS]
        out[:, :COLUMNS] = written / size

    def experts(self) -> None:
        """Expert r is chosen for row r alone, and writes the permuted row."""
        c = self.codes
        layer = f"layers.{EXPERT_LAYER}.post_attention_layernorm"
        block = f"layers.{EXPERT_LAYER}.mlp."
        always, row = self.unweigh(layer, c.always)[0], self.unweigh(layer, c.row)
        router = self.at(block + "gate.weight")
        router *= NOISE
        router[:ROWS] = 4 * row
        gate_up, down = (
            self.at(block + "experts.gate_up_proj"),
            self.at(block + "experts.down_proj"),
        )
        ffn = down.shape[-1]
        gate_up[:ROWS, 0], gate_up[:ROWS, ffn] = OPEN * always, always
        size = self.dims.hidden_size / 4  # of `always`, read after the norm and squared
        down[:ROWS] = 0  # four bits are not enough for a planted weight and its drawn neighbours
        down[:ROWS, :, 0] = c.next_row[c.permutations[0]] / (OPEN * size)

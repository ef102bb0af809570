"""A Qwen3.6 checkpoint whose greedy text is known: every part of the model decides a part of it.

A token is three digits (row, column, tail). The next token's
  row    is a permutation of this token's row, computed by the experts: expert r is chosen by row r;
  column is a permutation of what a DeltaNet state holds: the column of the token before the last
         one whose row was 0 (the convolution looks one token back; beta is one there, else zero);
  tail   is a permutation of the tail of the token LOOK_BACK positions ago, which attention finds
         by its rotary angles alone.
So a lost tail of the convolution, a state of another sequence, a block of another request or a
wrong position give other text at once, while rounding is far from doing so. Everything else is
drawn as in other tiny checkpoints, and small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from metainfer_lab.checkpoints import draws, modelopt
from metainfer_lab.checkpoints.tiny_qwen36 import calibrate, draw_tensors, tiny_config, write
from metainfer_lab.model import ModelDims
from metainfer_lab.model.tensors import text_prefix

if TYPE_CHECKING:
    import torch

    from metainfer_lab.oracle import Oracle

    Tensors = dict[str, torch.Tensor]

SIZES = ROWS, COLUMNS, TAILS = 8, 5, 5
VOCAB = ROWS * COLUMNS * TAILS
LOOK_BACK = 5
NOISE = 0.03  # of what is not planted, in units of what is
OPEN = 12.0  # input of a gate that lets all through, or (negative) nothing
SHARP = 6.0  # entries of q and k after their norm
STATE_LAYER, EXPERT_LAYER, ATTENTION_LAYER = 0, 1, 3


class Planted(NamedTuple):
    """The checkpoint, and the permutations that lead to the next token's digits."""

    folder: Path
    permutations: tuple[np.ndarray, np.ndarray, np.ndarray]

    def text(self, prompt: Sequence[int], length: int) -> list[int]:
        """The greedy text that follows a prompt of more than LOOK_BACK tokens."""
        tokens = list(prompt)
        for _ in range(length):
            tokens.append(self.next_token(tokens))
        return tokens[len(prompt) :]

    def next_token(self, tokens: Sequence[int]) -> int:
        """The token that follows."""
        rows, columns, tails = np.unravel_index(tokens, SIZES)
        marked = np.flatnonzero(rows[1:] == 0)
        row = self.permutations[0][rows[-1]]
        column = self.permutations[1][columns[marked[-1]]] if len(marked) else 0
        tail = self.permutations[2][tails[-1 - LOOK_BACK]]
        return int(np.ravel_multi_index((row, column, tail), SIZES))


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
    oracle: Oracle | None = None,
    granules: Mapping[str, int] | None = None,
) -> Planted:
    """Write the checkpoint: 200 tokens, four layers, other dimensions drawn within `granules`."""
    import torch

    rng, granules = np.random.default_rng(seed), dict(granules or {})
    fixed = {"vocab_size": VOCAB, "num_hidden_layers": 4, "rope_theta": 1e4, "rms_norm_eps": 1e-6}
    fixed["head_dim"] = math.lcm(granules.get("head_dim", 1), 32)  # four rotary pairs and more
    text = draws.draw_dims(rng, granules, quantised=quantised, **fixed)
    config = tiny_config(text, wrapped=quantised)
    dims, tensors = ModelDims.from_config(config), draw_tensors(config, seed)
    codes = _codes(dims.hidden_size, rng)
    _quieten(tensors)
    model = Planter(dims, tensors, codes)
    model.tokens()
    model.state()
    model.experts()
    model.attention()
    if not quantised:
        return Planted(write(folder, config, tensors, shards=1), codes.permutations)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    amax = calibrate(config, tensors, rng, oracle)
    packed = modelopt.quantise(tensors, dims, amax, rng, shifts=(0, 4, 8))
    write(folder, modelopt.quantised_config(config), packed, shards=1)
    return Planted(folder, codes.permutations)


def _codes(hidden: int, rng: np.random.Generator) -> Codes:
    import torch

    sizes = (ROWS, COLUMNS, TAILS, ROWS, COLUMNS, TAILS, 1)
    basis = torch.from_numpy(np.linalg.qr(rng.normal(size=(hidden, hidden)))[0]).float()
    permutations = tuple(_cycle(size, rng) for size in SIZES)
    return Codes(*basis[: sum(sizes)].split(sizes), permutations=permutations)


def _cycle(size: int, rng: np.random.Generator) -> np.ndarray:
    """A permutation that comes through all digits."""
    order = rng.permutation(size)
    made = np.empty_like(order)
    made[order] = np.roll(order, 1)
    return made


def _quieten(tensors: Tensors) -> None:
    """Make small what every block adds to the residual stream, and keep norms away from zero."""
    for name, tensor in tensors.items():
        if "norm" in name and "linear_attn" not in name:
            tensor.clamp_(-0.4, 0.4)  # what is planted behind a norm is divided by 1 + w
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            tensor *= NOISE


class Planter:
    """Writes the planted weights over drawn ones, each part in heads or experts of its own."""

    def __init__(self, dims: ModelDims, tensors: Tensors, codes: Codes):
        self.dims, self.tensors, self.codes = dims, tensors, codes
        self.prefix = text_prefix(dims)

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
        self.tensors["lm_head.weight"] = self._unweigh("norm", written)

    def state(self) -> None:
        """Value head 0 of the first DeltaNet keeps a column, one-hot, under one constant key."""
        gdn, c = self.dims.gdn, self.codes
        layer, block = f"layers.{STATE_LAYER}.input_layernorm", f"layers.{STATE_LAYER}.linear_attn."
        keys = gdn.num_key_heads * gdn.key_head_dim
        always, column = self._unweigh(layer, c.always)[0], self._unweigh(layer, c.column)
        marker = self._unweigh(layer, c.row[:1])[0]
        qkv, taps = self._at(block + "in_proj_qkv.weight"), self._at(block + "conv1d.weight")
        for first, size in ((0, gdn.key_head_dim), (keys, gdn.key_head_dim)):
            qkv[first : first + size], taps[first : first + size] = 0, 0
            qkv[first], taps[first, 0, -1] = OPEN * always, 1
        values = slice(2 * keys, 2 * keys + gdn.value_head_dim)
        qkv[values], taps[values] = 0, 0
        qkv[2 * keys : 2 * keys + COLUMNS] = OPEN * column
        taps[values, 0, -2] = 1  # the token before
        self._at(block + "in_proj_b.weight")[0] = 2 * OPEN * marker - OPEN * always
        self._at(block + "in_proj_a.weight")[0] = 0
        self._at(block + "A_log")[0] = -12.0
        self._at(block + "in_proj_z.weight")[: gdn.value_head_dim] = OPEN * always
        out, norm = self._at(block + "out_proj.weight"), self._at(block + "norm.weight")
        size = OPEN * math.sqrt(self.dims.hidden_size) / 2 * math.sqrt(gdn.value_head_dim)
        out[:, : gdn.value_head_dim] = 0
        written = c.next_column[c.permutations[1]].T / norm[:COLUMNS]
        out[:, :COLUMNS] = written / size

    def experts(self) -> None:
        """Expert r is chosen for row r alone, and writes the permuted row."""
        c = self.codes
        layer = f"layers.{EXPERT_LAYER}.post_attention_layernorm"
        block = f"layers.{EXPERT_LAYER}.mlp."
        always, row = self._unweigh(layer, c.always)[0], self._unweigh(layer, c.row)
        router = self._at(block + "gate.weight")
        router *= NOISE
        router[:ROWS] = 4 * row
        gate_up, down = (
            self._at(block + "experts.gate_up_proj"),
            self._at(block + "experts.down_proj"),
        )
        ffn = down.shape[-1]
        gate_up[:ROWS, 0], gate_up[:ROWS, ffn] = OPEN * always, always
        size = self.dims.hidden_size / 4  # of `always`, read after the norm and squared
        down[:ROWS] = 0  # four bits are not enough for a planted weight and its drawn neighbours
        down[:ROWS, :, 0] = c.next_row[c.permutations[0]] / (OPEN * size)

    def attention(self) -> None:
        """Query head 0 and its key head turn to one distance; the value is the tail found there."""
        import torch

        width, c = self.dims.head_dim, self.codes
        layer, block = (
            f"layers.{ATTENTION_LAYER}.{name}" for name in ("input_layernorm", "self_attn.")
        )
        always, tail = self._unweigh(layer, c.always)[0], self._unweigh(layer, c.tail)
        for norm in ("q_norm", "k_norm"):
            self._at(f"{block}{norm}.weight").add_(SHARP - 1)
        query, key = self._angles(0), self._angles(LOOK_BACK)
        q, k, v, o = (self._at(f"{block}{name}_proj.weight") for name in "qkvo")
        query = query / (1 + self._at(f"{block}q_norm.weight"))
        key = key / (1 + self._at(f"{block}k_norm.weight"))
        q[:width], k[:width] = torch.outer(query, always), torch.outer(key, always)
        q[width : 2 * width] = OPEN * always  # the gate
        v[:width] = 0
        v[:TAILS] = tail
        o[:, :width] = 0
        size = math.sqrt(self.dims.hidden_size) / math.sqrt(7)
        o[:, :TAILS] = c.next_tail[c.permutations[2]].T / size

    def _angles(self, positions: int) -> torch.Tensor:
        """[head_dim]: all rotary pairs turned by some positions, for which RoPE has to make up."""
        import torch

        half = self.dims.rotary_dim // 2
        frequencies = self.dims.rope_theta ** -(torch.arange(half) / half)
        made = torch.zeros(self.dims.head_dim)
        made[:half] = torch.cos(positions * frequencies)
        made[half : 2 * half] = torch.sin(positions * frequencies)
        return made

    def _unweigh(self, norm: str, directions: torch.Tensor) -> torch.Tensor:
        """Rows that read directions of the residual stream behind a norm with weight 1 + w."""
        return directions / (1 + self._at(f"{norm}.weight"))

    def _at(self, name: str) -> torch.Tensor:
        return self.tensors[self.prefix + name]

"""Checkpoints whose greedy text is known: every part of the model decides a part of it.

A token is made of digits. Each digit of the next token is a permutation of a digit that another
part of the model finds: among the present token's (MLP or experts), LOOK_BACK tokens ago
(attention, by its rotary angles alone), and in the hybrid in a recurrent state. So a lost tail of
a convolution, a state of another sequence, a block of another request or a wrong position give
other text at once, while rounding is far from doing so. Everything else is drawn as in other tiny
checkpoints, and small.

This is the part that all families share; `planted_dense` and `planted_qwen36` make checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from metainfer_lab.model import ModelDims
from metainfer_lab.model.tensors import text_prefix

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

LOOK_BACK = 5
NOISE = 0.03  # of what is not planted, in units of what is
OPEN = 12.0  # input of a gate that lets all through, or (negative) nothing
SHARP = 6.0  # entries of q and k
BLOCK_ENDS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")


class Planted(NamedTuple):
    """The checkpoint; sizes of a token's digits and the permutations that lead to the next ones;
    which part of the model finds each digit: (row, tail), or (row, column, tail) with a state."""

    folder: Path
    sizes: tuple[int, ...]
    permutations: tuple[np.ndarray, ...]
    parts: tuple[str, ...]

    def text(self, prompt: Sequence[int], length: int) -> list[int]:
        """The greedy text that follows a prompt of more than LOOK_BACK tokens."""
        tokens = list(prompt)
        for _ in range(length):
            tokens.append(self.next_token(tokens))
        return tokens[len(prompt) :]

    def departure(self, said: int, wanted: int) -> str:
        """What one token in place of another says about the model."""
        if said >= math.prod(self.sizes):
            return f"token {said}, which is never said, where the planted text has {wanted}"
        digits = zip(np.unravel_index([said, wanted], self.sizes), self.parts, strict=True)
        wrong = " and ".join(part for (a, b), part in digits if a != b)
        return f"token {said} where the planted text has {wanted}: wrong is what {wrong} found"

    def next_token(self, tokens: Sequence[int]) -> int:
        """The token that follows."""
        rows, *columns, tails = np.unravel_index(tokens, self.sizes)
        digits = [rows[-1], tails[-1 - LOOK_BACK]]
        made = [p[d] for p, d in zip(self.permutations[:: len(columns) + 1], digits, strict=True)]
        if columns:
            marked = np.flatnonzero(rows[1:] == 0)
            column = self.permutations[1][columns[0][marked[-1]]] if len(marked) else 0
            made.insert(1, column)
        return int(np.ravel_multi_index(made, self.sizes))


def cycle(size: int, rng: np.random.Generator) -> np.ndarray:
    """A permutation that comes through all digits."""
    order = rng.permutation(size)
    made = np.empty_like(order)
    made[order] = np.roll(order, 1)
    return made


def directions(hidden: int, sizes: Sequence[int], rng: np.random.Generator) -> list[torch.Tensor]:
    """Orthonormal directions [size, hidden] of the residual stream, for each of the sizes."""
    import torch

    basis = torch.from_numpy(np.linalg.qr(rng.normal(size=(hidden, hidden)))[0]).float()
    return list(basis[: sum(sizes)].split(tuple(sizes)))


def quieten(tensors: Tensors, neutral: float) -> None:
    """Make small what every block adds to the residual stream, and keep norms near their neutral
    value: what is planted behind a norm is divided by its weight."""
    for name, tensor in tensors.items():
        if "norm" in name and "linear_attn" not in name:
            tensor.clamp_(neutral - 0.4, neutral + 0.4)
        if name.endswith(BLOCK_ENDS):
            tensor *= NOISE


class Planter:
    """Writes planted weights over drawn ones, each part in heads or experts of its own.

    centred: norms store the difference from 1.
    """

    def __init__(self, dims: ModelDims, tensors: Tensors, centred: bool):
        self.dims, self.tensors, self.centred = dims, tensors, centred
        self.prefix = text_prefix(dims)

    def look_back(
        self,
        layer: int,
        always: torch.Tensor,
        tail: torch.Tensor,
        written: torch.Tensor,
        parts: int,
    ) -> None:
        """Query head 0 and its key head turn to one distance; the value is the tail found there.

        always [hidden], tail and written [tails, hidden]: what is read in every token, read where
        the head looks, and written for it; parts: of unit size in the residual stream here.
        """
        import torch

        width, block = self.dims.head_dim, f"layers.{layer}.self_attn."
        norm = f"layers.{layer}.input_layernorm"
        always, tail = self.unweigh(norm, always[None])[0], self.unweigh(norm, tail)
        size = math.sqrt(self.dims.hidden_size / parts)  # of a part, after the norm
        query, key = self.angles(0), self.angles(LOOK_BACK)
        if self.dims.qk_norm:
            for name in ("q_norm", "k_norm"):
                weight = self.at(f"{block}{name}.weight")
                weight += SHARP - 1
            query = query / self._factor(f"{block}q_norm")
            key = key / self._factor(f"{block}k_norm")
        else:
            query, key = SHARP / size * query, SHARP / size * key
        q, k, v, o = (self.at(f"{block}{name}_proj.weight") for name in "qkvo")
        q[:width], k[:width] = torch.outer(query, always), torch.outer(key, always)
        if self.dims.attn_output_gate:
            q[width : 2 * width] = OPEN * always
        v[:width] = 0
        v[: len(tail)] = tail
        o[:, :width] = 0
        o[:, : len(tail)] = written.T / size

    def angles(self, positions: int) -> torch.Tensor:
        """[head_dim]: all rotary pairs turned by some positions, for which RoPE has to make up."""
        import torch

        half = self.dims.rotary_dim // 2
        frequencies = self.dims.rope_theta ** -(torch.arange(half) / half)
        made = torch.zeros(self.dims.head_dim)
        made[:half] = torch.cos(positions * frequencies)
        made[half : 2 * half] = torch.sin(positions * frequencies)
        return made

    def unweigh(self, norm: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows [n, hidden] that read directions of the residual stream behind a norm."""
        return rows / self._factor(norm)

    def at(self, name: str) -> torch.Tensor:
        """A tensor of the text model."""
        return self.tensors[self.prefix + name]

    def _factor(self, norm: str) -> torch.Tensor:
        return self.at(f"{norm}.weight") + self.centred

"""Which experts an engine chose, held to what the oracle's routers say of the same tokens.

The oracle goes on with the engine's choice, so that one near tie does not hide everything behind
it; the choice itself is right if no expert that was left out beats a chosen one by more than the
margin of the engine's own precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from metainfer_lab.engine import EngineProcess
from metainfer_lab.model import ModelDims


class Scored(NamedTuple):
    """What `score` gave: logits [positions, V]; experts [layers, T, k], None in a dense model."""

    logits: np.ndarray
    experts: np.ndarray | None


class Choice(NamedTuple):
    """By how much an expert that was left out beats the least of the chosen ones, in logits of the
    router, and what an engine may err by: [layers, T]; least: that chosen expert's id."""

    behind: np.ndarray
    allowed: np.ndarray
    least: np.ndarray

    @property
    def worst(self) -> tuple[int, int]:
        """(layer, token) of the first choice that is wrong, or else of the one nearest to it."""
        beyond = np.argwhere(~(self.behind <= self.allowed))
        if len(beyond):
            return tuple(min(beyond.tolist()))
        return np.unravel_index((self.behind / self.allowed).argmax(), self.behind.shape)

    @property
    def unsure(self) -> np.ndarray:
        """Tokens [T] of which a right engine may send to another expert in some layer."""
        return (self.behind > -self.allowed).any(axis=0)


def score(
    engine: EngineProcess, tokens: Sequence[int], positions: Sequence[int], dims: ModelDims
) -> Scored:
    """`score`, with the chosen experts where the model has any."""
    if dims.moe is None:
        return Scored(engine.score(tokens, positions), None)
    return Scored(*engine.score(tokens, positions, routing=True))


def complaint(experts: np.ndarray, dims: ModelDims, tokens: int) -> str | None:
    """What is wrong with expert ids as such, before anybody asks whether they were the best."""
    count, k = dims.moe.num_experts, dims.moe.num_experts_per_tok
    shape = (dims.num_hidden_layers, tokens, k)
    if experts.shape != shape or not np.issubdtype(experts.dtype, np.integer):
        return f"expert ids are {experts.dtype} {list(experts.shape)}, not integers {list(shape)}"
    if not ((experts >= 0) & (experts < count)).all():
        return f"an expert id is not among the {count} experts"
    ranked = np.sort(experts, axis=-1)
    twice = np.argwhere(ranked[..., 1:] == ranked[..., :-1])
    if len(twice):
        return f"layer {twice[0][0]}, token {twice[0][1]}: an expert is there twice"
    return None


def choice(router: np.ndarray, experts: np.ndarray, allowed: np.ndarray) -> Choice:
    """router [layers, T, E]: logits of all experts; experts [layers, T, k]: the chosen ones."""
    chosen = np.take_along_axis(router, experts, axis=-1)
    others = router.copy()
    np.put_along_axis(others, experts, -np.inf, axis=-1)
    least = np.take_along_axis(experts, chosen.argmin(axis=-1)[..., None], axis=-1)[..., 0]
    return Choice(others.max(axis=-1) - chosen.min(axis=-1), allowed, least)


def best(router: np.ndarray, k: int) -> np.ndarray:
    """The k likeliest experts [layers, T, k]; equal ones go to the lowest id."""
    return np.argsort(-router, axis=-1, kind="stable")[..., :k]

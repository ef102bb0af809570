"""Where an engine departs first: the same checkpoint with all but some blocks silenced.

A block whose output projection is zero adds nothing to the residual stream. With all blocks silent
only embedding, final norm and head are left; then each block is heard alone. No hook in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from metainfer_lab.checkpoints.variants import silenced
from metainfer_lab.engine import EngineDied, EngineError
from metainfer_lab.gates.compare import relative_l2
from metainfer_lab.gates.trial import Trial, max_context
from metainfer_lab.model import ModelDims

WORDS = {"self_attn": "attention", "mlp": "MLP"}


def first_departure(trial: Trial, checkpoint: Path, tokens: Sequence[int]) -> str | None:
    """The first part, in the order of computation, that gives other logits than the oracle."""
    layers = ModelDims.from_config(checkpoint).num_hidden_layers
    blocks = [f"{layer}.{kind}" for layer in range(layers) for kind in WORDS]
    parts = {"embedding, final norm or head": []} | {_words(block): [block] for block in blocks}
    made = {name: silenced(checkpoint, trial.new_folder(), heard) for name, heard in parts.items()}
    positions = list(range(len(tokens)))
    got = {}
    try:
        with trial.candidate(None, max_context=max_context(checkpoint)) as engine:
            for name, folder in made.items():
                engine.load(folder)
                got[name] = engine.score(tokens, positions)
    except (EngineError, EngineDied):
        return None
    for name, folder in made.items():
        want, allowed = trial.ask(folder)(tokens, positions)
        if got[name].shape != want.shape:
            return name
        errors = relative_l2(got[name], want)
        typical = allowed.median is None or np.median(errors) <= allowed.median
        if not ((errors <= allowed.rows).all() and typical):
            return name
    return "only several blocks together (residual stream or their order)"


def _words(block: str) -> str:
    layer, kind = block.split(".")
    return f"layer {layer} {WORDS[kind]}"

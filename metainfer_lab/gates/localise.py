"""Where an engine departs first: the same checkpoint with all but some blocks silenced.

A block whose output projection is zero adds nothing to the residual stream. With all blocks silent
only embedding, final norm and head are left; then each block is heard alone. No hook in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from metainfer_lab.checkpoints.variants import block_of, silenced
from metainfer_lab.engine import EngineDied, EngineError
from metainfer_lab.gates.compare import compare_scored
from metainfer_lab.gates.routing import score
from metainfer_lab.gates.trial import Trial, max_context
from metainfer_lab.gates.verdict import Findings
from metainfer_lab.model import ModelDims, disk_tensors

WORDS = {
    "self_attn": "attention",
    "linear_attn": "DeltaNet",
    "mlp": "MLP",
    "mlp.experts": "experts",
    "mlp.shared_expert": "shared expert",
}  # in the order of computation


def first_departure(trial: Trial, checkpoint: Path, tokens: Sequence[int]) -> str | None:
    """The first part, in the order of computation, that gives other logits than the oracle."""
    dims = ModelDims.from_config(checkpoint)
    parts = {"embedding, final norm or head": []}
    parts |= {_words(block): [block] for block in _blocks(dims)}
    made = {name: silenced(checkpoint, trial.new_folder(), heard) for name, heard in parts.items()}
    got = {}
    try:
        with trial.candidate(None, max_context=max_context(checkpoint)) as engine:
            for name, folder in made.items():
                engine.load(folder)
                got[name] = score(engine, tokens, range(len(tokens)), dims)
    except (EngineError, EngineDied):
        return None
    for name, folder in made.items():
        findings = Findings()
        compare_scored(findings, name, got[name], trial.ask(folder), tokens, dims)
        if findings.failures:  # a wrong choice of experts shows whatever is heard
            return findings.failures[0].layer or name
    return "only several blocks together (residual stream or their order)"


def _blocks(dims: ModelDims) -> list[str]:
    found = {block for name in disk_tensors(dims) if (block := block_of(name))}
    order = list(WORDS)
    return sorted(found, key=lambda b: (int(b.split(".")[0]), order.index(b.partition(".")[2])))


def _words(block: str) -> str:
    layer, _, kind = block.partition(".")
    return f"layer {layer} {WORDS[kind]}"

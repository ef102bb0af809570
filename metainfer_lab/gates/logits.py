"""logits: `score` against the oracle, on tiny checkpoints and on the spec's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from metainfer_lab.gates.compare import compare_scored
from metainfer_lab.gates.localise import first_departure
from metainfer_lab.gates.routing import score
from metainfer_lab.gates.texts import excerpts
from metainfer_lab.gates.trial import Trial, max_context
from metainfer_lab.model import ModelDims

REAL_TOKENS = 120  # of a prompt through the spec's own weights
REAL_ROWS = 48  # of its logits
FULL_CONTEXT = 80  # at full width, where a row of logits is large


def logits(trial: Trial) -> None:
    """One layer, several, every way that the head may be stored; at full width on a GPU; the real
    weights."""
    for name, fixed in _shapes(trial):
        _scored(trial, f"tiny, {name}", trial.tiny(**fixed))
        if trial.findings.failures:
            return  # the first wrong checkpoint says enough, and where it departs
    if trial.device == "cuda":
        _scored(trial, "full width", trial.shallow(), FULL_CONTEXT)
    if checkpoint := trial.real():
        _real(trial, checkpoint)


def _shapes(trial: Trial) -> list[tuple[str, dict[str, Any]]]:
    if trial.dims.gdn:
        kinds = ("linear_attention", "full_attention")
        one = [(f"one layer of {kind}", {"layer_types": [kind]}) for kind in kinds]
        return [*one, ("four layers", {"num_hidden_layers": 4})]
    return [
        ("one layer", {"num_hidden_layers": 1}),
        ("three layers", {"num_hidden_layers": 3}),
        ("untied head", {"tie_word_embeddings": False}),
        ("tied head", {"tie_word_embeddings": True, "num_hidden_layers": 2}),
    ]


def _scored(trial: Trial, name: str, checkpoint: Path, limit: int = 256) -> None:
    dims, context = ModelDims.from_config(checkpoint), max_context(checkpoint, limit)
    middle = int(trial.rng.integers(2, 70))
    lengths = [1, middle, middle, context]  # equal ones too: an answer is not that of a length
    prompts = [trial.prompt(length, dims.vocab_size) for length in lengths]
    asked = [trial.rng.permutation(length).tolist() for length in lengths]
    asked[-1] += asked[-1][:5]  # any order, and repeats
    with trial.candidate(checkpoint, max_context=context) as engine:
        got = [score(engine, *case, dims) for case in zip(prompts, asked, strict=True)]
        plain = engine.score(prompts[1], asked[1])
    ask = trial.ask(checkpoint)
    found: list[str | None] = []  # the search is made once for a checkpoint

    def departure() -> str | None:
        if limit == FULL_CONTEXT:
            return None  # the search copies checkpoints, and this one is large
        if not found:
            found.append(first_departure(trial, checkpoint, prompts[1]))
            trial.ask(checkpoint)  # turns the oracle back
        return found[0]

    for prompt, positions, scored in zip(prompts, asked, got, strict=True):
        case = f"{name}, prompt of {len(prompt)}"
        compare_scored(trial.findings, case, scored, ask, prompt, dims, positions, departure)
    trial.findings.case()
    if not np.array_equal(plain, got[1].logits):
        trial.findings.fail(name, "score gives other logits when routing is asked for")


def _real(trial: Trial, checkpoint: Path) -> None:
    """Excerpts of text and random ids through the spec's own weights, REAL_ROWS rows of each."""
    dims = ModelDims.from_config(checkpoint)
    texts = excerpts(checkpoint, trial.rng, 2, REAL_TOKENS)
    prompts = [*texts, trial.prompt(REAL_TOKENS, dims.vocab_size)]
    asked = [np.sort(trial.rng.choice(len(p), REAL_ROWS, replace=False)).tolist() for p in prompts]
    with trial.candidate(checkpoint, max_context=512) as engine:
        got = [score(engine, *case, dims) for case in zip(prompts, asked, strict=True)]
    ask = trial.ask(checkpoint, "full")
    for i, prompt in enumerate(prompts):
        case = f"{trial.spec.model}, {'text' if i < len(texts) else 'random ids'}, prompt {i}"
        compare_scored(trial.findings, case, got[i], ask, prompt, dims, asked[i])

"""logits: `score` against the oracle, on tiny checkpoints and on the spec's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from metainfer_lab.gates.compare import compare_logits
from metainfer_lab.gates.localise import first_departure
from metainfer_lab.gates.texts import excerpts
from metainfer_lab.gates.trial import Trial, max_context
from metainfer_lab.model import ModelDims

REAL_TOKENS = 120  # of a prompt through the spec's own weights
REAL_ROWS = 48  # of its logits


def logits(trial: Trial) -> None:
    """One layer, several layers, as many key heads as queries; then the real weights."""
    for name, fixed in (
        ("one layer", {"num_hidden_layers": 1}),
        ("three layers", {"num_hidden_layers": 3}),
        ("untied head", {"tie_word_embeddings": False}),
        ("tied head", {"tie_word_embeddings": True, "num_hidden_layers": 2}),
    ):
        _tiny(trial, name, trial.tiny(**fixed))
        if trial.findings.failures:
            return  # the first wrong checkpoint says enough, and where it departs
    if checkpoint := trial.real():
        _real(trial, checkpoint)


def _tiny(trial: Trial, name: str, checkpoint: Path) -> None:
    vocab = ModelDims.from_config(checkpoint).vocab_size
    context = max_context(checkpoint)
    lengths = [1, int(trial.rng.integers(2, 70)), context]
    prompts = [trial.prompt(length, vocab) for length in lengths]
    asked = [trial.rng.permutation(length).tolist() for length in lengths]
    asked[-1] += asked[-1][:5]  # any order, and repeats
    with trial.candidate(checkpoint, max_context=context) as engine:
        got = [engine.score(*case) for case in zip(prompts, asked, strict=True)]
    ask = trial.ask(checkpoint)
    truth = [ask(*case) for case in zip(prompts, asked, strict=True)]
    found: list[str | None] = []  # the search is made once for a checkpoint

    def departure() -> str | None:
        if not found:
            found.append(first_departure(trial, checkpoint, prompts[1]))
        return found[0]

    for i, prompt in enumerate(prompts):
        case = f"tiny, {name}, prompt of {len(prompt)}"
        compare_logits(trial.findings, case, got[i], truth[i], asked[i], departure)


def _real(trial: Trial, checkpoint: Path) -> None:
    """Excerpts of text and random ids through the spec's own weights, REAL_ROWS rows of each."""
    vocab = ModelDims.from_config(checkpoint).vocab_size
    texts = excerpts(checkpoint, trial.rng, 2, REAL_TOKENS)
    prompts = [*texts, trial.prompt(REAL_TOKENS, vocab)]
    asked = [np.sort(trial.rng.choice(len(p), REAL_ROWS, replace=False)).tolist() for p in prompts]
    with trial.candidate(checkpoint, max_context=512) as engine:
        got = [engine.score(*case) for case in zip(prompts, asked, strict=True)]
    ask = trial.ask(checkpoint, "full")
    for i, prompt in enumerate(prompts):
        case = f"{trial.spec.model}, {'text' if i < len(texts) else 'random ids'}, prompt {i}"
        compare_logits(trial.findings, case, got[i], ask(prompt, asked[i]), asked[i])

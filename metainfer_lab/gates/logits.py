"""logits: `score` against the oracle, on tiny checkpoints and on the spec's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from metainfer_lab.engine import EngineProcess
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
    made = [Case(trial, f"tiny, {name}", trial.tiny(**fixed)) for name, fixed in _shapes(trial)]
    if trial.device == "cuda":
        made.append(Case(trial, "full width", trial.shallow(), FULL_CONTEXT))
    with trial.candidate(None) as engine:  # one for all: on a GPU each start takes ten seconds
        for case in made:
            case.score(engine)
    for case in made:
        case.judge(trial)
        if trial.findings.failures:
            return  # the first wrong checkpoint says enough, and where it departs
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


class Case:
    """One checkpoint, prompts of several lengths, and what the engine scored of them."""

    def __init__(self, trial: Trial, name: str, checkpoint: Path, limit: int = 256):
        self.name, self.checkpoint, self.limit = name, checkpoint, limit
        self.dims = ModelDims.from_config(checkpoint)
        self.context = max_context(checkpoint, limit)
        middle = int(trial.rng.integers(2, 70))
        # Equal lengths too: an answer is not that of a length.
        lengths = [1, middle, middle, self.context]
        self.prompts = [trial.prompt(length, self.dims.vocab_size) for length in lengths]
        self.asked = [trial.rng.permutation(length).tolist() for length in lengths]
        self.asked[-1] += self.asked[-1][:5]  # any order, and repeats

    def score(self, engine: EngineProcess) -> None:
        engine.load(self.checkpoint, max_context=self.context)
        pairs = zip(self.prompts, self.asked, strict=True)
        self.got = [score(engine, *pair, self.dims) for pair in pairs]
        self.plain = engine.score(self.prompts[1], self.asked[1])

    def judge(self, trial: Trial) -> None:
        ask = trial.ask(self.checkpoint)
        found: list[str | None] = []  # the search is made once for a checkpoint

        def departure() -> str | None:
            if self.limit == FULL_CONTEXT:
                return None  # the search copies checkpoints, and this one is large
            if not found:
                found.append(first_departure(trial, self.checkpoint, self.prompts[1]))
                trial.ask(self.checkpoint)  # turns the oracle back
            return found[0]

        for prompt, positions, scored in zip(self.prompts, self.asked, self.got, strict=True):
            case = f"{self.name}, prompt of {len(prompt)}"
            given = (ask, prompt, self.dims, positions, departure)
            compare_scored(trial.findings, case, scored, *given)
        trial.findings.case()
        if not np.array_equal(self.plain, self.got[1].logits):
            detail = "score gives other logits when routing is asked for"
            trial.findings.fail(self.name, detail)


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

"""drift: a long answer, scored by the oracle; its end may be no worse than its beginning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from metainfer_lab.engine import StepResult
from metainfer_lab.gates.compare import Truth, judge_text, log_softmax
from metainfer_lab.gates.tolerances import DRIFT
from metainfer_lab.gates.trial import Trial
from metainfer_lab.model import ModelDims

PROMPT = 20
ATTEMPTS = 4  # about one text in eight of the hybrid comes to a near tie between experts
STEPS = {"cpu": 300, "cuda": 2000}  # of decode


def drift(trial: Trial) -> None:
    """One request far beyond the contexts that other gates ask, drawn at temperature 1.

    A cache or a state that is kept in fewer bits than the spec says errs from its first steps on; a
    step that is not exact errs more with each one.
    """
    for _ in range(ATTEMPTS if trial.exact_text else 1):
        if _asked(trial, STEPS[trial.device]):
            return


def _asked(trial: Trial, steps: int) -> bool:
    """Whether the text was judged to its end, and not to a near tie between experts alone."""
    checkpoint = trial.tiny(max_position_embeddings=steps + PROMPT)
    prompt = trial.prompt(PROMPT, ModelDims.from_config(checkpoint).vocab_size)
    seed = int(trial.rng.integers(2**40))
    params = {"max_new_tokens": steps, "ignore_eos": True, "temperature": 1.0, "seed": seed}
    with trial.candidate(checkpoint, max_context=steps + PROMPT, max_batch=2) as engine:
        results = engine.answer(prompt, params)
    case = f"{steps} steps of decode"
    if len(results) != steps:
        trial.findings.fail(case, f"{len(results)} tokens came, {steps} were asked for")
        return True
    tokens = [*prompt, *(result.token for result in results[:-1])]
    truth = trial.ask(checkpoint)(tokens, range(PROMPT - 1, len(tokens)))
    judge_text(trial.findings, case, prompt, params, results, lambda *_: truth)
    whole = not (trial.exact_text and truth.unsure)
    if whole and not trial.findings.failures:
        _growth(trial, case, results, truth)
    return whole or bool(trial.findings.failures)


def _growth(trial: Trial, case: str, results: Sequence[StepResult], truth: Truth) -> None:
    """RMS error of the log-probabilities over the last third against that over the first."""
    chosen = [result.token for result in results]
    right = log_softmax(truth.logits)[np.arange(len(chosen)), chosen]
    errors = np.abs(np.array([result.logprob for result in results]) - right)
    third = len(errors) // 3
    first, last = (float(np.sqrt(np.mean(part**2))) for part in (errors[:third], errors[-third:]))
    least = DRIFT.floor * float(np.median(truth.allowed.logprob))
    detail = f"RMS error of a logprob over the last {third} steps; over the first it is {first:.2g}"
    trial.findings.case()
    trial.findings.measure(case, last, DRIFT.growth * max(first, least), detail=detail)

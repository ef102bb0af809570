"""limits: at the edges the right answer, beyond them a ValueError that names the argument."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metainfer_lab.engine import EngineProcess, StepResult
from metainfer_lab.gates.compare import judge_text
from metainfer_lab.gates.trial import Trial, refused
from metainfer_lab.model import ModelDims

CONTEXT = 40

# What a sampling parameter must not be.
BAD_PARAMS: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.5, math.nan, math.inf),
    "top_p": (0.0, 1.5),
    "top_k": (-1, 2.5),
    "min_p": (-0.1, 1.1),
    "repetition_penalty": (0.0,),
    "presence_penalty": (3.0,),
    "frequency_penalty": (-3.0,),
    "logprobs": (21, -1),
    "max_new_tokens": (0, True),
    "min_tokens": (-1,),
    "seed": (-1, 0.5),
}
MOST_NAMED = 3  # arguments in one error: who blames all of them has found none


def limits(trial: Trial) -> None:
    """Refusals that change nothing, then the edges of the context."""
    checkpoint = trial.tiny(num_hidden_layers=2)
    dims = ModelDims.from_config(checkpoint)
    vocab = dims.vocab_size
    probe, params = trial.prompt(9, vocab), {"max_new_tokens": 8, "ignore_eos": True}
    with trial.candidate(checkpoint, max_context=CONTEXT) as engine:
        before = engine.answer(probe, params)
        _bad_calls(trial, engine, vocab)
        _idle(trial, engine)
        after = engine.answer(probe, params)
        edges = _edges(trial, engine, vocab)
        scored = engine.score(trial.prompt(CONTEXT, vocab), [CONTEXT - 1])
        _bad_loads(trial, engine, checkpoint, dims)
    trial.findings.case()
    if [r[1:] for r in before] != [r[1:] for r in after]:
        trial.findings.fail("after refused calls", "the same request has another answer")
    if scored.shape != (1, vocab):
        trial.findings.fail("score of a full context", f"shape {list(scored.shape)}")
    ask = trial.ask(checkpoint, answers=[(edge[1], edge[3]) for edge in edges])
    for case, prompt, given, results, wanted, finish in edges:
        got = (len(results), results[-1].finish_reason if results else None)
        if got != (wanted, finish):
            trial.findings.fail(case, f"(tokens, finish_reason) is {got}, not {(wanted, finish)}")
        judge_text(trial.findings, case, prompt, given, results, ask)


def _refused(trial: Trial, case: str, name: str, call: Callable[[], Any]) -> None:
    def scattered(text: str) -> bool:
        blamed = BAD_PARAMS.keys() & set(re.findall(r"\w+", text))
        return name in BAD_PARAMS and len(blamed) > MOST_NAMED

    refused(trial.findings, case, name, call, scattered)


def _bad_calls(trial: Trial, engine: EngineProcess, vocab: int) -> None:
    fine = trial.prompt(5, vocab)
    for what, tokens in (
        ("empty", []),
        ("an id beyond the vocabulary", [*fine, vocab]),
        ("a negative id", [*fine, -1]),
        ("a fraction", [*fine, 0.5]),
    ):
        _refused(trial, f"score, {what}", "tokens", lambda t=tokens: engine.score(t, [0]))
        _refused(trial, f"submit, {what}", "tokens", lambda t=tokens: engine.submit(t))
    long = trial.prompt(CONTEXT + 1, vocab)
    _refused(trial, "score, too long", "tokens", lambda: engine.score(long, [0]))
    _refused(trial, "submit, no room", "tokens", lambda: engine.submit(long[:CONTEXT]))
    for positions in ([], [5], [-1]):
        case = f"score, positions {positions} of 5 tokens"
        _refused(trial, case, "positions", lambda p=positions: engine.score(fine, p))
    bad = {"tempreature": (1.0,), "stop_token_ids": ([vocab],)}
    bad["logit_bias"] = ({vocab: 1.0}, {0: math.nan})
    for name, value in ((name, x) for name, values in (BAD_PARAMS | bad).items() for x in values):
        case = f"submit, {name}={value!r}"
        _refused(trial, case, name, lambda n=name, v=value: engine.submit(fine, {n: v}))
    both = {"min_tokens": 9, "max_new_tokens": 8}
    _refused(trial, "submit, min_tokens 9 of 8", "min_tokens", lambda: engine.submit(fine, both))
    _refused(trial, "cancel, unknown", "request_id", lambda: engine.cancel(10**6))


def _idle(trial: Trial, engine: EngineProcess) -> None:
    """Refused calls have left nothing behind, and a step with nothing to do gives nothing."""
    trial.findings.case()
    stats = engine.stats()
    left = {name: stats.get(name) for name in ("running", "waiting", "cache_bytes_used")}
    if any(value != 0 for value in left.values()):
        trial.findings.fail("after refused calls", f"stats say {left}")
    if results := engine.step():
        trial.findings.fail("a step with nothing to do", f"gave {results[0]}")


Edge = tuple[str, list[int], dict[str, Any], list[StepResult], int, str]


def _edges(trial: Trial, engine: EngineProcess, vocab: int) -> list[Edge]:
    """(case, prompt, params, results, wanted tokens, wanted finish reason)."""
    asked = [
        ("a prompt of one token", 1, 3, 3),
        ("one new token", 10, 1, 1),
        ("a prompt that leaves room for one", CONTEXT - 1, 5, 1),
        ("an answer that fills the context", 10, CONTEXT + 99, CONTEXT - 10),
        ("an answer that just fits", 10, CONTEXT - 10, CONTEXT - 10),
    ]
    edges: list[Edge] = []
    for case, length, max_new_tokens, wanted in asked:
        params = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
        prompt = trial.prompt(length, vocab)
        edges.append((case, prompt, params, engine.answer(prompt, params), wanted, "length"))
    return edges


def _bad_loads(trial: Trial, engine: EngineProcess, checkpoint: Path, dims: ModelDims) -> None:
    for name, value in (
        ("max_batch", 0),
        ("max_context", 0),
        ("max_context", dims.max_position_embeddings + 1),
        ("cache_bytes", 16),
        ("device", "abacus"),
    ):
        case = f"load, {name}={value!r}"
        _refused(trial, case, name, lambda n=name, v=value: engine.load(checkpoint, **{n: v}))

"""sampling: draws have the distribution that the parameters describe; seeds hold."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from metainfer_lab.engine import EngineProcess
from metainfer_lab.gates.compare import log_softmax
from metainfer_lab.gates.tolerances import ALPHA
from metainfer_lab.gates.trial import Trial, describe
from metainfer_lab.model import ModelDims

DRAWS = 600
LEAST_EXPECTED = 5.0  # draws in a bin of the chi-square test
PROMPTS = 8  # at most, for two answers that must differ: a peaked model may say one thing twice
PROMPT = 16  # tokens, negative logits among them; each draw is a request of its own

CASES: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 2.0, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.3, "min_p": 0.15},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.7, "top_k": 30},
    {"temperature": 3.0, "repetition_penalty": 4.0},  # gets a bias that confines it
)


def sampling(trial: Trial) -> None:
    """Chi-square tests and supports, penalties under greedy decoding, seeds."""
    checkpoint = trial.tiny(num_hidden_layers=1)
    vocab = ModelDims.from_config(checkpoint).vocab_size
    prompt = trial.prompt(PROMPT, vocab)
    confined = dict.fromkeys([*prompt, *trial.prompt(6, vocab)], 60.0)
    biases = dict.fromkeys(trial.prompt(3, vocab), 2.5)
    cases = [*CASES[:-1], CASES[-1] | {"logit_bias": confined}]
    cases.append({"temperature": 1.0, "logit_bias": biases})
    with trial.candidate(checkpoint, max_context=64, max_batch=16) as engine:
        counts = [_draw(trial, engine, prompt, params) for params in cases]
        own = engine.score(prompt, [PROMPT - 1])[0]
        penalised = _penalised(trial, engine, vocab)
        _seeds(trial, engine, [trial.prompt(PROMPT, vocab) for _ in range(PROMPTS)])
    # Where activations are rounded, the cuts of filters fall where the engine's own logits say;
    # that those are right is the logits gate's question.
    logits = trial.ask(checkpoint)(prompt, [PROMPT - 1]).logits[0] if trial.exact_text else own
    for params, count in zip(cases, counts, strict=True):
        _distribution(trial, describe(params), count, probabilities(logits, params, prompt))
    _judge_penalties(trial, checkpoint, *penalised)


def adjusted(
    logits: np.ndarray, params: dict[str, Any], prompt: list[int], output: list[int]
) -> np.ndarray:
    """Logits [V] after penalties and bias, in float64; counts are of the output alone."""
    logits = logits.astype(np.float64).copy()
    seen = sorted({*prompt, *output})
    penalty = params.get("repetition_penalty", 1.0)
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    for token, count in Counter(output).items():
        logits[token] -= params.get("frequency_penalty", 0.0) * count
        logits[token] -= params.get("presence_penalty", 0.0)
    for token, bias in params.get("logit_bias", {}).items():
        logits[token] += bias
    return logits


def probabilities(logits: np.ndarray, params: dict[str, Any], prompt: list[int]) -> np.ndarray:
    """The distribution [V] of the first new token under a temperature above 0."""
    p = np.exp(log_softmax(adjusted(logits, params, prompt, []) / params["temperature"]))
    order = np.argsort(-p, kind="stable")  # ties at a cut go to the lower id
    ranked = p[order]
    if top_k := params.get("top_k", 0):
        ranked[top_k:] = 0
        ranked /= ranked.sum()
    ranked[np.cumsum(ranked) - ranked >= params.get("top_p", 1.0)] = 0
    ranked[ranked < params.get("min_p", 0.0) * ranked[0]] = 0
    p[order] = ranked / ranked.sum()
    return p


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """The probability of counts at least this far from their expectation.

    Rare values share one bin; if it is rare as well, its count is held to Poisson's upper tail and
    the others are compared among themselves: a rare bin thrown into a full one hides a value that
    comes ten times too often. The tail of chi-square by Wilson and Hilferty's cube root (1931).
    """
    common = expected >= LEAST_EXPECTED
    seen, wanted = counts[common], expected[common]
    rare, mean = int(counts[~common].sum()), float(expected[~common].sum())
    chance = 1.0
    if mean >= LEAST_EXPECTED:
        seen, wanted = np.append(seen, rare), np.append(wanted, mean)
    else:
        chance, wanted = _poisson_tail(rare, mean), wanted * seen.sum() / wanted.sum()
    freedom = len(wanted) - 1
    if freedom < 1:
        return chance
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    spread = 2 / (9 * freedom)
    deviate = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return min(chance, math.erfc(deviate / math.sqrt(2)) / 2)


def _poisson_tail(least: int, mean: float) -> float:
    """The probability of `least` or more."""
    if not least:
        return 1.0
    terms = (k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(least, least + 100))
    return min(1.0, sum(map(math.exp, terms)))


def _draw(
    trial: Trial, engine: EngineProcess, prompt: list[int], params: dict[str, Any]
) -> Counter[int]:
    for _ in range(DRAWS):
        seed = int(trial.rng.integers(2**40))
        engine.submit(prompt, params | {"max_new_tokens": 1, "ignore_eos": True, "seed": seed})
    return Counter(result.token for result in engine.finish())


def _distribution(trial: Trial, case: str, drawn: Counter[int], p: np.ndarray) -> None:
    trial.findings.case()
    counts = np.array([drawn[token] for token in range(len(p))])
    if counts.sum() != DRAWS:
        trial.findings.fail(case, f"{DRAWS} requests gave {drawn.total()} tokens")
        return
    outside = np.flatnonzero((counts > 0) & (p == 0))
    if outside.size:
        token = int(outside[0])
        detail = f"token {token} was drawn {counts[token]} times; its probability is 0"
        trial.findings.fail(case, detail)
        return
    chance = chi_square(counts, DRAWS * p)
    if not chance >= ALPHA:
        far = int(np.abs(counts - DRAWS * p).argmax())
        detail = f"{DRAWS} draws have another distribution (chance {chance:.1g}): token {far} came "
        detail += f"{counts[far]} times, expected are {DRAWS * p[far]:.1f}"
        trial.findings.fail(case, detail)


def _penalised(
    trial: Trial, engine: EngineProcess, vocab: int
) -> tuple[list[int], list[tuple[dict[str, Any], list[int]]]]:
    """Greedy answers under each penalty alone, and under all of them.

    A bias confines the choice to some tokens of the prompt and some others, so that negative
    logits and tokens that only the prompt has decide as often as any.
    """
    ids = trial.rng.permutation(vocab)[:24].tolist()
    prompt, confined = ids[:12], dict.fromkeys(ids[6:], 40.0)
    every = {"repetition_penalty": 1.4, "presence_penalty": 1.1, "frequency_penalty": 0.7}
    answers = []
    for penalties in (*({name: value} for name, value in every.items()), every):
        params = penalties | {"max_new_tokens": 24, "ignore_eos": True, "logit_bias": confined}
        answers.append((params, [result.token for result in engine.answer(prompt, params)]))
    return prompt, answers


def _judge_penalties(
    trial: Trial,
    checkpoint: Path,
    prompt: list[int],
    answers: list[tuple[dict[str, Any], list[int]]],
) -> None:
    ask = trial.ask(checkpoint)
    for params, tokens in answers:
        trial.findings.case()
        before = [*prompt, *tokens[:-1]]
        truth = ask(before, range(len(prompt) - 1, len(before)))
        for i, token in enumerate(tokens):
            wanted = adjusted(truth.logits[i], params, prompt, tokens[:i])
            behind = wanted.max() - wanted[token]
            if (
                i not in truth.unsure and behind > 4 * truth.allowed.logprob[i]
            ):  # a penalty may stretch an error a little
                best = int(wanted.argmax())
                detail = f"greedy took {token}; with the penalties {best} leads by {behind:.3g}"
                trial.findings.fail(describe(params)[:80], detail, position=i)
                break


def _seeds(trial: Trial, engine: EngineProcess, prompts: list[list[int]]) -> None:
    """Equal seeds agree, others and none do not; next to no temperature is greedy."""

    def answer(prompt: list[int] = prompts[0], **params: Any) -> list[int]:
        params |= {"max_new_tokens": 20, "ignore_eos": True}
        return [result.token for result in engine.answer(prompt, params)]

    def differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
        return any(answer(p, **hot, **one) != answer(p, **hot, **other) for p in prompts)

    hot: dict[str, Any] = {"temperature": 1.5}
    greedy = answer()
    checks = {
        "the same seed twice gives two answers": answer(**hot, seed=7) == answer(**hot, seed=7),
        "two seeds give one answer": differ({"seed": 7}, {"seed": 8}),
        "two requests without a seed give one answer": differ({}, {}),
        "a temperature of 1e-6 is not greedy": answer(temperature=1e-6, seed=3) == greedy,
        "top_k=1 is not greedy": answer(**hot, top_k=1) == greedy,
        "a tiny top_p is not greedy": answer(**hot, top_p=1e-9) == greedy,
        "min_p=1 is not greedy": answer(**hot, min_p=1.0) == greedy,
    }
    for complaint, holds in checks.items():
        trial.findings.case()
        if not holds:
            trial.findings.fail("seeds and limits", complaint)

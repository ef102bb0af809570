"""The comparisons: logits with logits, and an engine's text with what the oracle thinks of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from metainfer_lab.engine import StepResult
from metainfer_lab.gates.tolerances import Tolerance
from metainfer_lab.gates.verdict import Findings
from metainfer_lab.oracle import Oracle


def relative_l2(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Per row, ||got - want|| / ||want||; [rows]."""
    difference = np.linalg.norm(got.astype(np.float64) - want, axis=-1)
    return difference / np.linalg.norm(want.astype(np.float64), axis=-1)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural logarithms of the softmax over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl_divergence(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Per row, KL(want || got) in nats; [rows]."""
    p, q = log_softmax(want), log_softmax(got)
    return (np.exp(p) * (p - q)).sum(axis=-1)


def compare_logits(
    findings: Findings,
    case: str,
    got: np.ndarray,
    want: np.ndarray,
    positions: Sequence[int],
    allowed: Tolerance,
    layer: Callable[[], str | None] = lambda: None,
) -> bool:
    """Shape, dtype and finiteness first, then relative L2, KL and the likeliest token.

    layer: called once on failure, to find the first part that departs.
    """
    findings.case()
    if got.shape != want.shape or got.dtype != np.float32:
        shape = f"{got.dtype} {list(got.shape)}, not float32 {list(want.shape)}"
        findings.fail(case, f"score returned {shape}")
        return False
    if not np.isfinite(got).all():
        row = int(np.argmin(np.isfinite(got).all(axis=-1)))
        findings.fail(case, "logits are not finite", position=positions[row], layer=layer())
        return False
    errors = relative_l2(got, want)
    beyond = np.flatnonzero(~(errors <= allowed.l2_max))
    row = int(min(beyond, key=lambda i: positions[i])) if beyond.size else int(errors.argmax())
    detail = "relative L2 of the logits against the oracle"
    if beyond.size:
        detail += f"; {beyond.size} of {len(errors)} positions are beyond, worst {errors.max():.3g}"
    within = findings.measure(
        case,
        float(errors[row]),
        allowed.l2_max,
        position=positions[row],
        layer=layer() if beyond.size else None,
        detail=detail,
    )
    return within and _finer(findings, case, got, want, positions, allowed)


def _finer(
    findings: Findings,
    case: str,
    got: np.ndarray,
    want: np.ndarray,
    positions: Sequence[int],
    allowed: Tolerance,
) -> bool:
    quantile = float(np.quantile(relative_l2(got, want), 0.95))
    within = True
    if len(positions) >= 20:
        what = "95th percentile of the relative L2"
        within = findings.measure(case, quantile, allowed.l2_p95, detail=what)
    divergence = kl_divergence(got, want)
    row = int(divergence.argmax())
    what = "KL divergence in nats"
    where = positions[row]
    within &= findings.measure(
        case, float(divergence[row]), allowed.kl, position=where, detail=what
    )
    sure = margins(want) > 2 * allowed.l2_max * np.linalg.norm(want, axis=-1)
    wrong = np.flatnonzero(sure & (got.argmax(axis=-1) != want.argmax(axis=-1)))
    if wrong.size:
        findings.fail(
            case, "another likeliest token than the oracle's", position=positions[wrong[0]]
        )
    return within and not wrong.size


def margins(logits: np.ndarray) -> np.ndarray:
    """Per row, the distance from the greatest logit to the next; [rows]."""
    top = np.partition(logits, -2, axis=-1)[:, -2:]
    return top[:, 1] - top[:, 0]


def text_of(results: Sequence[StepResult], request: int) -> list[StepResult]:
    """One request's results, in the order they came."""
    return [result for result in results if result.request == request]


def judge_text(
    findings: Findings,
    case: str,
    prompt: Sequence[int],
    params: dict[str, Any],
    results: Sequence[StepResult],
    oracle: Oracle,
    allowed: Tolerance,
) -> None:
    """Score an engine's answer by the oracle, teacher-forced on the engine's own text.

    Log-probabilities and the listed top tokens must agree; a greedy token must be the oracle's
    likeliest wherever the oracle's margin is wider than twice the tolerance.
    """
    findings.case()
    if not results:
        findings.fail(case, "no token came")
        return
    tokens = [result.token for result in results]
    before = [*prompt, *tokens[:-1]]
    positions = range(len(prompt) - 1, len(before))
    logits = oracle.logits(before, positions)
    logprobs = log_softmax(logits)
    for i, result in enumerate(results):
        if not 0 <= result.token < logits.shape[1]:
            findings.fail(case, f"token {result.token} is outside the vocabulary", position=i)
            return
        error = abs(result.logprob - logprobs[i, result.token])
        if not findings.measure(
            case,
            float(error),
            allowed.logprob,
            position=i,
            detail=f"logprob of output token {i} (prompt of {len(prompt)})",
        ):
            return
        if not _greedy_holds(findings, case, params, logprobs[i], result, i, allowed):
            return
        if not _top_holds(findings, case, params, logprobs[i], result, i, allowed):
            return


def _greedy_holds(
    findings: Findings,
    case: str,
    params: dict[str, Any],
    logprobs: np.ndarray,
    result: StepResult,
    i: int,
    allowed: Tolerance,
) -> bool:
    if params.get("temperature", 0) or ADJUSTING & params.keys():
        return True
    behind = logprobs.max() - logprobs[result.token]
    if behind <= 2 * allowed.logprob:
        return True
    best = int(logprobs.argmax())
    detail = f"greedy took token {result.token}; the oracle's {best} is {behind:.3g} nats likelier"
    findings.fail(case, detail, position=i)
    return False


ADJUSTING = {"logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty"}
ADJUSTING |= {"min_tokens"}


def _top_holds(
    findings: Findings,
    case: str,
    params: dict[str, Any],
    logprobs: np.ndarray,
    result: StepResult,
    i: int,
    allowed: Tolerance,
) -> bool:
    wanted = params.get("logprobs", 0)
    if not wanted:
        if result.top_logprobs is not None:
            findings.fail(case, "top_logprobs came though none were asked for", position=i)
        return result.top_logprobs is None
    top = result.top_logprobs or []
    ids = [token for token, _ in top]
    if len(set(ids)) != wanted or any(not 0 <= token < len(logprobs) for token in ids):
        findings.fail(case, f"top_logprobs has ids {ids}, not {wanted} distinct ones", position=i)
        return False
    values = np.array([value for _, value in top])
    error = float(np.abs(values - logprobs[ids]).max())
    best = np.sort(logprobs)[::-1][:wanted]
    error = max(error, float(np.abs(values - best).max()))
    what = f"top_logprobs of output token {i}"
    return findings.measure(case, error, allowed.logprob, position=i, detail=what)

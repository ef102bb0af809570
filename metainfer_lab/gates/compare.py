"""The comparisons: logits with logits, and an engine's text with what the oracle thinks of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import numpy as np

from metainfer_lab.checkpoints.planted import Planted
from metainfer_lab.engine import StepResult
from metainfer_lab.gates.routing import Choice, Scored, best, choice, complaint
from metainfer_lab.gates.tolerances import (
    FIXED,
    LEAST_ROWS,
    Allowance,
    Calibration,
    Depth,
    calibrated,
    fixed,
)
from metainfer_lab.gates.verdict import Findings
from metainfer_lab.model import ModelDims
from metainfer_lab.oracle import Oracle, Routed

# Parameters under which a greedy token need not be the likeliest of the model's own distribution.
ADJUSTING = {"logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty"}
ADJUSTING |= {"min_tokens"}


TIES = 3  # ways of breaking near ties between experts that the oracle tries


class Truth(NamedTuple):
    """The oracle's logits [rows, V] in float64 and what an engine may differ from them by.

    choice: how good the experts are that the oracle went on with, None where there are none;
    unsure: rows where a right engine may have gone through other experts than the oracle did.
    """

    logits: np.ndarray
    allowed: Allowance
    choice: Choice | None = None
    unsure: frozenset[int] = frozenset()


Text = tuple[Sequence[int], Sequence[int]]  # tokens, and the positions asked for


class Ask(Protocol):
    """The oracle turned to a checkpoint; experts: those that the engine chose, if it said so."""

    def __call__(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        experts: np.ndarray | None = None,
    ) -> Truth: ...


def fixed_truth(
    oracle: Oracle,
    activations: str,
    depth: Depth,
    per_token: int | None,
    tokens: Sequence[int],
    positions: Sequence[int],
    experts: np.ndarray | None = None,
) -> Truth:
    """The oracle's answer with the table's tolerances; per_token: experts that a token has."""
    logits, router = oracle.routed(tokens, positions, experts)
    allowed = fixed(activations, depth, len(positions))
    if router is None:
        return Truth(logits, allowed)
    margin = np.full(router.shape[:2], FIXED[activations, depth].router)
    if experts is not None:
        return Truth(logits, allowed, choice(router, experts, margin))
    made = choice(router, best(router, per_token), margin)
    # One other expert, and every later token reads another past: far beyond these tolerances.
    return Truth(logits, allowed, made, rows_of(np.maximum.accumulate(made.unsure), positions))


def calibrated_truth(
    oracle: Oracle,
    by: Calibration,
    per_token: int | None,
    tokens: Sequence[int],
    positions: Sequence[int],
    experts: np.ndarray | None = None,
) -> Truth:
    """The oracle's answer with tolerances from its own answers under rounded activations."""
    if experts is None:
        return calibrated_truths(oracle, by, per_token, [(tokens, positions)])[0]
    logits, router = oracle.routed(tokens, positions, experts)
    others = [oracle.routed(tokens, positions, experts, how) for how in by.roundings]
    made = choice(router, experts, _margin(by, router, others))
    return Truth(logits, _cost(by, logits, others), made)


def calibrated_truths(
    oracle: Oracle, by: Calibration, per_token: int | None, texts: Sequence[Text]
) -> list[Truth]:
    """`calibrated_truth` of some texts, each pass over all of them."""
    plain = oracle.together(texts)
    others = [
        [*found]
        for found in zip(*(oracle.together(texts, None, how) for how in by.roundings), strict=True)
    ]
    if plain[0].router is None:
        pairs = zip(plain, others, strict=True)
        return [Truth(one.logits, _cost(by, one.logits, its)) for one, its in pairs]
    margins = [_margin(by, one.router, its) for one, its in zip(plain, others, strict=True)]
    # Another expert for some token before may move any row: near ties broken at random show it.
    rng = np.random.default_rng()
    for _ in range(TIES):
        noisy = [
            one.router + rng.uniform(-0.5, 0.5, one.router.shape) * margin[..., None]
            for one, margin in zip(plain, margins, strict=True)
        ]
        broken = oracle.together(texts, [best(router, per_token) for router in noisy])
        for its, other in zip(others, broken, strict=True):
            its.append(other)
    truths = []
    for (_, positions), one, its, margin in zip(texts, plain, others, margins, strict=True):
        made = choice(one.router, best(one.router, per_token), margin)
        cost = _cost(by, one.logits, its)
        truths.append(Truth(one.logits, cost, made, rows_of(made.unsure, positions)))
    return truths


def _margin(by: Calibration, router: np.ndarray, others: Sequence[Routed]) -> np.ndarray:
    """What two router logits of a token may be off by: [layers, T]."""
    moved = np.max([np.abs(other.router - router).max(axis=-1) for other in others], axis=0)
    return by.router * np.maximum(moved, np.median(moved, axis=1, keepdims=True))


def _cost(by: Calibration, logits: np.ndarray, others: Sequence[Routed]) -> Allowance:
    measures = (relative_l2, kl_divergence, _rms_logprob)
    errors = (
        np.max([measure(other.logits, logits) for other in others], 0) for measure in measures
    )
    return calibrated(by, *errors)


def rows_of(tokens: np.ndarray, positions: Sequence[int]) -> frozenset[int]:
    """Indices into `positions` of those whose token is marked [T]."""
    return frozenset(row for row, position in enumerate(positions) if tokens[position])


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


def _rms_logprob(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    return np.sqrt(np.square(log_softmax(got) - log_softmax(want)).mean(axis=-1))


def margins(logits: np.ndarray) -> np.ndarray:
    """Per row, the distance from the greatest logit to the next; [rows]."""
    top = np.partition(logits, -2, axis=-1)[:, -2:]
    return top[:, 1] - top[:, 0]


def compare_scored(
    findings: Findings,
    case: str,
    got: Scored,
    ask: Ask,
    tokens: Sequence[int],
    dims: ModelDims,
    positions: Sequence[int] | None = None,
    layer: Callable[[], str | None] = lambda: None,
) -> Truth | None:
    """`compare_logits` with the oracle on the experts that the engine chose; None if wrong."""
    positions = range(len(tokens)) if positions is None else positions
    if got.experts is not None and (wrong := complaint(got.experts, dims, len(tokens))):
        findings.case()
        findings.fail(case, wrong)
        return None
    truth = ask(tokens, positions, got.experts)
    right = compare_logits(findings, case, got.logits, truth, positions, layer)
    return truth if right else None


def compare_logits(
    findings: Findings,
    case: str,
    got: np.ndarray,
    truth: Truth,
    positions: Sequence[int],
    layer: Callable[[], str | None] = lambda: None,
) -> bool:
    """Shape, dtype and finiteness first, then relative L2, KL, the likeliest token, the experts.

    layer: called once on failure, to find the first part that departs.
    """
    findings.case()
    want, allowed = truth.logits, truth.allowed
    if got.shape != want.shape or got.dtype != np.float32:
        shape = f"{got.dtype} {list(got.shape)}, not float32 {list(want.shape)}"
        findings.fail(case, f"score returned {shape}")
        return False
    if not np.isfinite(got).all():
        row = int(np.argmin(np.isfinite(got).all(axis=-1)))
        findings.fail(case, "logits are not finite", position=positions[row], layer=layer())
        return False
    errors = relative_l2(got, want)
    beyond = np.flatnonzero(~(errors <= allowed.rows))
    nearest = int((errors / allowed.rows).argmax())
    row = int(min(beyond, key=lambda i: positions[i])) if beyond.size else nearest
    detail = "relative L2 of the logits against the oracle"
    if beyond.size:
        detail += f"; {beyond.size} of {len(errors)} positions are beyond, worst {errors.max():.3g}"
    within = findings.measure(
        case,
        float(errors[row]),
        float(allowed.rows[row]),
        position=positions[row],
        layer=layer() if beyond.size else None,
        detail=detail,
    )
    return (
        within
        and _finer(findings, case, got, truth, positions, layer)
        and (truth.choice is None or _experts(findings, case, truth.choice))
    )


def _experts(findings: Findings, case: str, made: Choice) -> bool:
    layer, token = made.worst
    behind, allowed = float(made.behind[layer, token]), float(made.allowed[layer, token])
    return findings.measure(
        case,
        max(behind, 0.0),
        allowed,
        position=int(token),
        layer=f"layer {layer} router" if behind > allowed else None,
        detail=f"layer {layer}, token {token}: expert {made.least[layer, token]} was chosen, "
        f"another's router logit is {behind:.3g} higher",
    )


def _finer(
    findings: Findings,
    case: str,
    got: np.ndarray,
    truth: Truth,
    positions: Sequence[int],
    layer: Callable[[], str | None],
) -> bool:
    want, allowed = truth.logits, truth.allowed
    errors = relative_l2(got, want)
    quantiles = [(0.95, allowed.p95)] + ([(0.5, allowed.median)] if allowed.median else [])
    for quantile, limit in quantiles if len(positions) >= LEAST_ROWS else []:
        error = float(np.quantile(errors, quantile))
        what = f"{100 * quantile:.0f}th percentile of the relative L2 over {len(positions)} rows"
        where = None if error <= limit else layer()
        if not findings.measure(case, error, limit, detail=what, layer=where):
            return False
    divergence = kl_divergence(got, want)
    row = int((divergence / allowed.kl).argmax())
    within = findings.measure(
        case,
        float(divergence[row]),
        float(allowed.kl[row]),
        position=positions[row],
        detail="KL divergence in nats",
    )
    sure = margins(want) > 2 * allowed.rows * np.linalg.norm(want, axis=-1)
    wrong = np.flatnonzero(sure & (got.argmax(axis=-1) != want.argmax(axis=-1)))
    if wrong.size:
        where = positions[wrong[0]]
        findings.fail(case, "another likeliest token than the oracle's", position=where)
    return within and not wrong.size


def text_with(prompt: Sequence[int], results: Sequence[StepResult]) -> Text:
    """What the oracle is asked of an answer: the tokens before each of its own."""
    before = [*prompt, *(result.token for result in results[:-1])]
    return before, range(len(prompt) - 1, len(before))


def text_of(results: Sequence[StepResult], request: int) -> list[StepResult]:
    """One request's results, in the order they came."""
    return [result for result in results if result.request == request]


def judge_text(
    findings: Findings,
    case: str,
    prompt: Sequence[int],
    params: dict[str, Any],
    results: Sequence[StepResult],
    ask: Ask,
) -> None:
    """Score an engine's answer by the oracle, teacher-forced on the engine's own text.

    Log-probabilities and the listed top tokens must agree; a greedy token must be the oracle's
    likeliest wherever the oracle's margin is wider than twice the tolerance. The first wrong token
    ends the comparison: what follows it is another text. Nothing is asked where a near tie between
    experts may have sent a right engine another way.
    """
    findings.case()
    if not results:
        findings.fail(case, "no token came")
        return
    truth = ask(*text_with(prompt, results))
    logits, allowed, logprobs = truth.logits, truth.allowed, log_softmax(truth.logits)
    for i, result in enumerate(results):
        if not 0 <= result.token < logits.shape[1]:
            findings.fail(case, f"token {result.token} is outside the vocabulary", position=i)
            return
        if i in truth.unsure:
            continue
        what = f"logprob of output token {i}, after a prompt of {len(prompt)}"
        error, limit = abs(result.logprob - logprobs[i, result.token]), allowed.logprob[i]
        if not findings.measure(case, float(error), float(limit), position=i, detail=what):
            return
        complaint = _greedy(params, logprobs[i], result, limit) or _top(params, logprobs[i], result)
        if complaint:
            findings.fail(case, complaint, position=i)
            return
        if result.top_logprobs:
            values = np.array([value for _, value in result.top_logprobs])
            error = np.abs(values - logprobs[i, [token for token, _ in result.top_logprobs]]).max()
            best = np.sort(logprobs[i])[::-1][: len(values)]
            error = max(error, np.abs(values - best).max())
            what = f"top_logprobs of output token {i}"
            if not findings.measure(case, float(error), float(limit), position=i, detail=what):
                return


def exact_text(
    findings: Findings,
    case: str,
    results: Sequence[StepResult],
    made: Planted,
    prompt: Sequence[int],
) -> None:
    """The greedy text of a planted checkpoint, token by token."""
    findings.case()
    said = [result.token for result in results]
    for at, wanted in enumerate(made.text(prompt, len(said))):
        if said[at] != wanted:
            findings.fail(case, made.departure(said[at], wanted), position=at)
            return


def same_tokens(
    findings: Findings,
    case: str,
    where: str,
    got: Sequence[StepResult],
    want: Sequence[StepResult],
) -> None:
    """Equal tokens of two answers to one request; where: "in company than alone"."""
    findings.case()
    pairs = zip_longest([result.token for result in got], [result.token for result in want])
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is not None:
        findings.fail(case, f"other tokens {where}", position=at)


def _greedy(
    params: dict[str, Any], logprobs: np.ndarray, result: StepResult, limit: float
) -> str | None:
    if params.get("temperature", 0) or ADJUSTING & params.keys():
        return None
    behind = logprobs.max() - logprobs[result.token]
    if behind <= 2 * limit:
        return None
    best = int(logprobs.argmax())
    return f"greedy took token {result.token}; the oracle's {best} is {behind:.3g} nats likelier"


def _top(params: dict[str, Any], logprobs: np.ndarray, result: StepResult) -> str | None:
    wanted = params.get("logprobs", 0)
    if not wanted:
        unasked = result.top_logprobs is not None
        return "top_logprobs came though none were asked for" if unasked else None
    ids = [token for token, _ in result.top_logprobs or []]
    if len(set(ids)) != wanted or any(not 0 <= token < len(logprobs) for token in ids):
        return f"top_logprobs has ids {ids}, not {wanted} distinct ones"
    values = [value for _, value in result.top_logprobs or []]
    return None if values == sorted(values, reverse=True) else "top_logprobs are not descending"

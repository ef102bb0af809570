"""speed: the spec's goals, measured beside what they compare with; some timed tokens checked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from metainfer_lab.bench.compare import Measurement, floors, measure, summary
from metainfer_lab.bench.timing import Sample, spread
from metainfer_lab.engine import Engine
from metainfer_lab.gates.trial import Trial
from metainfer_lab.gates.verdict import Findings, NotJudged
from metainfer_lab.hardware import Hardware
from metainfer_lab.live import Silent
from metainfer_lab.spec import Goals

CHECKED_SHARE = 0.1
CHECKED_STREAMS = 5  # of all timed runs together: each is a pass of the oracle or several
# A rival whose 80th percentile is this many times its 20th was not alone on the machine.
BUSY = 1.5
# So was one with a single run that took this many times as long as its best.
STALLED = 3.0
# Share of all processors that others may use when the clock starts, and how long it may take.
QUIET_PERCENT, PATIENCE_S = 30, 60


def speed(trial: Trial) -> None:
    """Rates and times against the goals; not judged without goals, weights or the spec's machine.

    Baselines run in turn with the engine in the same minutes, so a goal that is a ratio asks about
    the engine and not about the machine's mood.
    """
    if not trial.spec.goals.model_dump(exclude_defaults=True):
        raise NotJudged("the spec has no goals")
    if elsewhere := _other_machine(trial):
        raise NotJudged(elsewhere)
    checkpoint = trial.real()
    if checkpoint is None:
        raise NotJudged(f"checkpoint {trial.spec.checkpoint.source} is not on this machine")
    if not _quiet():
        raise NotJudged(f"other processes kept the machine busy for {PATIENCE_S} s")
    with Engine(trial.folder, trial.spec, trial.sandbox) as engine:
        trial.level = engine.process.level
        trial.sockets |= engine.process.sockets
        measured = measure(engine, live=Silent())
    trial.findings.note = summary(measured)
    if busy := _busy(measured):
        raise NotJudged(f"{busy}; {summary(measured)}")
    _hold_to_goals(measured, trial.spec.goals, trial.findings)
    _check_tokens(trial, checkpoint, measured.samples[measured.engine])


def _other_machine(trial: Trial) -> str | None:
    """Why this is not the machine that the goals are meant for; None when it is."""
    hardware = trial.spec.hardware
    if hardware == "cpu":
        return None
    if trial.device == "cpu":
        return f"the goals are for {hardware}; this ran on a CPU"
    import torch

    title, here = Hardware.load(hardware).name, torch.cuda.get_device_name()
    same = title.lower() in here.lower()
    return None if same else f"the goals are for {hardware}; this is {here}"


def _quiet() -> bool:
    """Wait until others leave the processors alone; False when they do not."""
    deadline = time.monotonic() + PATIENCE_S
    while (busy := psutil.cpu_percent(interval=1.0)) > QUIET_PERCENT:
        if time.monotonic() > deadline:
            return False
    return busy <= QUIET_PERCENT


def _busy(measured: Measurement) -> str | None:
    """Whether something else was at work; told by the rivals, while the engine stood still."""
    for rival in measured.rivals:
        rates = measured.rates(rival)
        usual = spread(rates)
        if usual.p80 > BUSY * usual.p20 or max(rates) > STALLED * min(rates):
            span = f"{min(rates):.3g} to {max(rates):.3g} tok/s"
            return f"the machine was busy: {rival} ran at {span}"
    return None


def _hold_to_goals(measured: Measurement, goals: Goals, findings: Findings) -> None:
    ours = measured.samples[measured.engine]
    rate = spread(measured.rates(measured.engine)).p50
    least: dict[str, tuple[float, float]] = {
        f"decode rate over {rival}": (measured.ratio(rival).median, ratio)
        for rival, ratio in goals.ratio_to.items()
    }
    if goals.fraction_of_products:
        share = measured.ratio("products").median
        least["share of the matrix products alone"] = share, goals.fraction_of_products
    if goals.fraction_of_floor:
        floor = floors(measured.plan, measured.workload)["decode_tok_s"]
        least["share of the floor"] = rate / floor, goals.fraction_of_floor
    if goals.tok_s:
        least["decode tok/s"] = rate, goals.tok_s
    for what, (value, goal) in least.items():
        findings.case()
        if not value >= goal:
            findings.fail(what, f"{value:.3g}, at least {goal:g} asked ({summary(measured)})")
    for metric in ("ttft_ms", "tpot_ms"):
        if goal := getattr(goals, metric):
            findings.case()
            value = spread(getattr(sample, metric) for sample in ours).p50
            if not value <= goal:
                findings.fail(metric, f"{value:.3g} ms, at most {goal:g} asked")


def _check_tokens(trial: Trial, checkpoint: Path, samples: Sequence[Sample]) -> None:
    """A random tenth of some streams: the token must be the oracle's best, or as good as that.

    As good: its logit lies within twice the calibrated error of the greatest one.
    """
    ask = trial.ask(checkpoint, "full")
    streams = [
        (f"timed run {run}", *stream)
        for run, sample in enumerate(samples, 1)
        for stream in zip(sample.prompts, sample.tokens, strict=True)
    ]
    some = min(CHECKED_STREAMS, len(streams))
    for stream in sorted(trial.rng.choice(len(streams), some, replace=False).tolist()):
        case, prompt, tokens = streams[stream]
        count = max(1, round(CHECKED_SHARE * len(tokens)))
        chosen = sorted(trial.rng.choice(len(tokens), count, replace=False).tolist())
        positions = [len(prompt) + index - 1 for index in chosen]
        truth = ask([*prompt, *tokens], positions)
        errors = truth.allowed.logprob
        asked = zip(chosen, positions, truth.logits, errors, strict=True)
        for index, position, row, limit in asked:
            trial.findings.case()
            behind = float(row.max() - row[tokens[index]])
            detail = f"token {tokens[index]} is {behind:.3g} behind token {int(row.argmax())}"
            trial.findings.measure(case, behind, 2 * limit, position=position + 1, detail=detail)

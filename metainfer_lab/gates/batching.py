"""batching: a request's answer does not depend on its neighbours, their arrival or their end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from metainfer_lab.checkpoints import variants
from metainfer_lab.checkpoints.planted import LOOK_BACK
from metainfer_lab.engine import EngineProcess, StepResult
from metainfer_lab.gates.compare import exact_text, judge_text, same_tokens, text_of
from metainfer_lab.gates.trial import Trial, max_context
from metainfer_lab.model import ModelDims
from metainfer_lab.model.tensors import text_prefix

REQUESTS = 12
MAX_BATCH = 4
FLAT = 8.0  # a temperature at which planted text is no longer sure


@dataclass(frozen=True)
class Event:
    """Before a step: submit request number `request`, or cancel it."""

    step: int
    request: int
    cancel: bool = False


@dataclass
class Played:
    """What a schedule gave: ids by request number, all results, results after a cancel, stats."""

    ids: dict[int, int]
    results: list[StepResult]
    late: list[StepResult]
    stats: dict[str, Any]

    def answer(self, request: int) -> list[StepResult]:
        return text_of(self.results, self.ids[request])


def batching(trial: Trial) -> None:
    """A random schedule whose text is known to the letter; one that runs twice and is scored by the
    oracle; then neighbours made of NaN."""
    if not trial.full_width:  # planted checkpoints are small
        _planted(trial)
    _scored(trial)
    _hostile(trial)


def _scored(trial: Trial) -> None:
    checkpoint = trial.tiny(num_hidden_layers=2)
    prompts, params = _draw(trial, ModelDims.from_config(checkpoint).vocab_size, 1.0)
    events = _schedule(trial)
    settings = {"max_context": max_context(checkpoint), "max_batch": MAX_BATCH}
    with trial.candidate(checkpoint, **settings) as engine:
        first = _play(engine, prompts, params, events)
        engine.load(checkpoint)
        second = _play(engine, prompts, params, events)
    cancelled = {event.request for event in events if event.cancel}
    _accounts(trial, first, cancelled, params)
    trial.findings.case()
    if first.results != second.results:
        trial.findings.fail("the same calls twice", _difference(first.results, second.results))
    ask = trial.ask(checkpoint, answers=[(prompts[i], first.answer(i)) for i in range(REQUESTS)])
    for i in range(REQUESTS):
        if i in cancelled and not first.answer(i):
            continue
        case = f"request {i} of {REQUESTS} in a batch of {MAX_BATCH}"
        judge_text(trial.findings, case, prompts[i], params[i], first.answer(i), ask)


def _planted(trial: Trial) -> None:
    """Greedy requests say their text whatever is beside them; a seed draws what it draws alone."""
    made = trial.planted()
    prompts, params = _draw(trial, math.prod(made.sizes), FLAT)
    events = _schedule(trial)
    cancelled = {event.request for event in events if event.cancel}
    settings = {"max_context": max_context(made.folder), "max_batch": MAX_BATCH}
    with trial.candidate(made.folder, **settings) as engine:
        played = _play(engine, prompts, params, events)
        drawn = [i for i in range(REQUESTS) if "seed" in params[i] and i not in cancelled]
        alone = {i: engine.answer(prompts[i], params[i]) for i in drawn}
    _accounts(trial, played, cancelled, params)
    for i in range(REQUESTS):
        case = f"planted text, request {i} of {REQUESTS} in a batch of {MAX_BATCH}"
        if "seed" not in params[i] and (i not in cancelled or played.answer(i)):
            exact_text(trial.findings, case, played.answer(i), made, prompts[i])
    for i in drawn if trial.exact_text else ():
        what = f"request {i}", "in company than alone (same seed)"
        same_tokens(trial.findings, *what, played.answer(i), alone[i])


def _draw(
    trial: Trial, vocab: int, temperature: float
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    rng, least = trial.rng, LOOK_BACK + 1
    lengths = [least, least + 2, 17, 40, 90, 150]
    prompts = [trial.prompt(int(rng.choice(lengths)), vocab) for _ in range(REQUESTS)]
    params = []
    for i in range(REQUESTS):
        drawn: dict[str, Any] = {"max_new_tokens": int(rng.integers(4, 30)), "ignore_eos": True}
        if i % 2:
            drawn |= {"temperature": temperature, "seed": int(rng.integers(2**40))}
        params.append(drawn)
    for i in range(MAX_BATCH):  # there are always neighbours, and running requests to cancel
        params[i]["max_new_tokens"] = 40
    prompts[3] = trial.prompt(150, vocab)
    return prompts, params


def _schedule(trial: Trial) -> list[Event]:
    """Arrivals before random steps, the first four together; four are cancelled, while they decode,
    prefill, wait, and at some other time."""
    rng = trial.rng
    starts = [0] * MAX_BATCH + sorted(rng.integers(0, 25, REQUESTS - MAX_BATCH).tolist())
    events = [Event(step, i) for i, step in enumerate(starts)]
    waiting, other = (int(i) for i in rng.choice(range(MAX_BATCH, REQUESTS), 2, replace=False))
    for i, step in ((2, 9), (3, 1), (waiting, starts[waiting]), (other, starts[other] + 4)):
        events.append(Event(step, i, cancel=True))
    return sorted(events, key=lambda event: (event.step, event.cancel))


def _play(
    engine: EngineProcess,
    prompts: list[list[int]],
    params: list[dict[str, Any]],
    events: list[Event],
) -> Played:
    ids: dict[int, int] = {}
    gone: set[int] = set()
    results: list[StepResult] = []
    late: list[StepResult] = []
    finished: set[int] = set()
    for step in range(events[-1].step + 1):
        for event in (e for e in events if e.step == step):
            if not event.cancel:
                ids[event.request] = engine.submit(prompts[event.request], params[event.request])
            elif ids[event.request] not in finished:
                engine.cancel(ids[event.request])
                gone.add(ids[event.request])
        new = engine.step()
        late += [result for result in new if result.request in gone]
        results += new
        finished |= {result.request for result in new if result.finish_reason}
    new = engine.finish()
    late += [result for result in new if result.request in gone]
    return Played(ids, results + new, late, engine.stats())


def _accounts(
    trial: Trial, played: Played, cancelled: set[int], params: list[dict[str, Any]]
) -> None:
    """Nothing lost, nothing twice, nothing after a cancel; everything given back."""
    findings = trial.findings
    findings.case()
    if len(set(played.ids.values())) != REQUESTS:
        findings.fail("request ids", f"{REQUESTS} requests got the ids {played.ids}")
    strangers = {result.request for result in played.results} - set(played.ids.values())
    if strangers:
        findings.fail("results", f"came for requests {strangers} that nobody submitted")
    if played.late:
        findings.fail("cancel", f"{played.late[0]} came after its request was cancelled")
    for i in set(range(REQUESTS)) - cancelled:
        wanted, got = params[i]["max_new_tokens"], len(played.answer(i))
        if wanted != got:
            findings.fail(f"request {i}", f"{got} tokens came, {wanted} were asked for")
    for name in ("running", "waiting", "cache_bytes_used"):
        if played.stats.get(name) != 0:
            findings.fail("stats", f"{name} is {played.stats.get(name)} when nothing is left")
    if not 2 <= played.stats.get("largest_batch", 0) <= MAX_BATCH:
        seen = played.stats.get("largest_batch")
        findings.fail("stats", f"largest_batch is {seen} with four requests at once, of 4 allowed")


def _difference(first: list[StepResult], second: list[StepResult]) -> str:
    pairs = [(a, b) for a, b in zip(first, second, strict=False) if a != b]
    return f"gave {pairs[0][0]} and then {pairs[0][1]}" if pairs else "gave more results once"


def _hostile(trial: Trial) -> None:
    """One row of the embedding is NaN; whoever reads it poisons itself and nobody else."""
    sound = trial.tiny(num_hidden_layers=2, tie_word_embeddings=False)
    dims = ModelDims.from_config(sound)
    vocab = dims.vocab_size
    poison = int(trial.rng.integers(2, vocab))

    def edit(tensors: variants.Tensors) -> None:
        tensors[f"{text_prefix(dims)}embed_tokens.weight"][poison] = float("nan")

    poisoned = variants.edited(sound, trial.new_folder(), edit)
    victims = [[t for t in trial.prompt(60, vocab) if t != poison] for _ in range(4)]
    params = {"max_new_tokens": 12, "ignore_eos": True, "logit_bias": {poison: -1e9}}
    hostile = {"max_new_tokens": 9, "ignore_eos": True}
    settings = {"max_context": max_context(sound, 128), "max_batch": 3}
    with trial.candidate(poisoned, **settings) as engine:
        ids = []
        for victim in victims:  # neighbours before, beside and, in the reused slot, after
            engine.submit([poison] * 70, hostile)
            ids.append(engine.submit(victim, params))
        results = engine.finish()
    answers = [text_of(results, request) for request in ids]
    ask = trial.ask(sound, answers=[*zip(victims, answers, strict=True)])
    for i, (victim, answer) in enumerate(zip(victims, answers, strict=True)):
        case = f"victim {i} beside neighbours that compute NaN"
        judge_text(trial.findings, case, victim, params, answer, ask)

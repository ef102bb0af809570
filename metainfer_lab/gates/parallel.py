"""parallel: several ranks against one and the oracle; a lost rank is an error within seconds."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from metainfer_lab.engine import EngineDied, EngineError, EngineProcess, StepResult
from metainfer_lab.gates.compare import compare_logits, judge_text, same_tokens, text_of
from metainfer_lab.gates.trial import Trial, max_context
from metainfer_lab.gates.verdict import NotJudged
from metainfer_lab.model import ModelDims

REQUESTS = 5
ANSWER_S = 60.0  # the longest that one answer of several ranks may take
LOST_S = 10.0  # in which the loss of a rank must be said


@dataclass
class Heard:
    """What an engine of so many ranks gave on the same questions."""

    logits: np.ndarray
    results: list[StepResult] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def answer(self, request: int) -> list[StepResult]:
        return text_of(self.results, self.ids[request])


def parallel(trial: Trial) -> None:
    """Each number of ranks that engine.json names, and the spec's, on a checkpoint of its own."""
    worlds = _worlds(trial)
    for world in worlds:
        checkpoint = _checkpoint(trial, world, shared=world == max(worlds))
        vocab = ModelDims.from_config(checkpoint).vocab_size
        prompts = [trial.prompt(int(trial.rng.integers(1, 90)), vocab) for _ in range(REQUESTS)]
        params = [_params(trial, i) for i in range(REQUESTS)]
        score, context = trial.prompt(60, vocab), max_context(checkpoint, 160)
        with trial.candidate(checkpoint, max_context=context) as engine:
            alone = _ask(engine, score, prompts, params)
        several = {"max_context": context, "world": world, "timeout_s": ANSWER_S}
        with trial.candidate(checkpoint, **several) as engine:
            heard = _ask(engine, score, prompts, params)
            if world == min(worlds):
                _lose(trial, engine, world - 1, prompts[0])
        ask, case = trial.ask(checkpoint), f"{world} ranks"
        truth, positions = ask(score, range(len(score))), range(len(score))
        compare_logits(trial.findings, case, heard.logits, truth, positions)
        for i, prompt in enumerate(prompts):
            answer, what = heard.answer(i), f"{case}, request {i}"
            judge_text(trial.findings, what, prompt, params[i], answer, ask)
            if trial.exact_text and ("seed" in params[i] or "temperature" not in params[i]):
                where = "of several ranks than of one (same seed)"
                same_tokens(trial.findings, what, where, answer, alone.answer(i))
        if trial.findings.failures:
            return


def _worlds(trial: Trial) -> list[int]:
    """Numbers of ranks beyond one that can be tried here; NotJudged when there are none."""
    worlds = sorted({world for world in trial.manifest.worlds if world > 1})
    asked = trial.spec.parallel.tp
    if asked > 1 and asked not in worlds:
        raise EngineError("engine.json", f"worlds {worlds} lacks the {asked} ranks of the spec")
    if not worlds:
        raise NotJudged("the engine runs on one rank, as its spec asks")
    if trial.device == "cpu":
        return worlds
    import torch

    here = torch.cuda.device_count()
    if not any(world <= here for world in worlds):
        raise NotJudged(f"{here} GPU here; the engine's ranks are {worlds}")
    return [world for world in worlds if world <= here]


def _checkpoint(trial: Trial, world: int, *, shared: bool) -> Path:
    """Dimensions that ranks can share: two of them a key head, or each has two of its own."""
    rng, granules = trial.rng, trial.manifest.granules

    def multiple(name: str, low: int, high: int, of: int = world) -> int:
        granule = math.lcm(granules.get(name, 1), of)
        return granule * int(rng.integers(-(-low // granule), max(low, high) // granule + 2))

    heads = 2 * world * int(rng.integers(1, 3))
    return trial.tiny(
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=world // 2 if shared else 2 * world,
        hidden_size=multiple("hidden_size", 40, 72, of=heads),
        intermediate_size=multiple("intermediate_size", 50, 110),
        vocab_size=multiple("vocab_size", 150, 260),
    )


def _params(trial: Trial, i: int) -> dict[str, Any]:
    """Greedy ones and drawn ones, the last without a seed: ranks must agree all the same."""
    params: dict[str, Any] = {"max_new_tokens": int(trial.rng.integers(8, 20)), "ignore_eos": True}
    if i % 2 or i == REQUESTS - 1:
        params["temperature"] = 1.0
    if i % 2:
        params["seed"] = int(trial.rng.integers(2**40))
    return params


def _ask(
    engine: EngineProcess, score: list[int], prompts: list[list[int]], params: list[dict[str, Any]]
) -> Heard:
    """The ranks' stats are compared at each call of stats, their ids at each submit (host.py)."""
    heard = Heard(engine.score(score, range(len(score))))
    heard.ids = [engine.submit(*case) for case in zip(prompts, params, strict=True)]
    given_up = engine.submit(prompts[0], params[0])
    for _ in range(3):
        heard.results += engine.step()
        engine.stats()
    engine.cancel(given_up)
    heard.results += engine.finish()
    engine.stats()
    return heard


def _lose(trial: Trial, engine: EngineProcess, last: int, prompt: list[int]) -> None:
    """Kill the last rank while it decodes; the next step must raise, in words, and soon."""
    engine.submit(prompt, {"max_new_tokens": 60, "ignore_eos": True})
    for _ in range(4):
        engine.step()
    engine.rank(last).kill()
    killed = time.monotonic()
    trial.findings.case()
    said = "no error came, and steps went on"
    try:
        while time.monotonic() < killed + LOST_S:
            engine.step()
    except EngineError:
        said = ""
    except EngineDied as error:
        said = f"no error of the engine's own came, it had to be ended ({error})"
    seconds = time.monotonic() - killed
    if said or seconds > LOST_S:
        trial.findings.fail(f"rank {last} killed", f"{said or 'an error came'}: {seconds:.0f} s")
    engine.kill()

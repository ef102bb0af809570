"""decode: submit and step, one request at a time, scored by the oracle on the engine's own text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metainfer_lab.checkpoints.planted import LOOK_BACK
from metainfer_lab.engine import EngineProcess, StepResult
from metainfer_lab.gates.compare import exact_text, judge_text
from metainfer_lab.gates.texts import excerpts
from metainfer_lab.gates.tolerances import Depth
from metainfer_lab.gates.trial import Trial, describe, max_context
from metainfer_lab.model import ModelDims

# Around these lengths blocks, chunks and tiles end; one below and one above are asked as well.
BOUNDARIES = (1, 2, 16, 32, 64, 128)
PLANTED = {"max_new_tokens": 40, "ignore_eos": True}


@dataclass
class Asked:
    """A request and what came of it."""

    case: str
    prompt: list[int]
    params: dict[str, Any]
    results: list[StepResult] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [result.token for result in self.results]


def decode(trial: Trial) -> None:
    """Text known to the letter; prompts of many lengths, greedy and random, and ways to end, scored
    by the oracle; the real weights last."""
    if not trial.full_width:  # planted checkpoints are small
        _planted(trial)
    for layers in (2, 3):
        # A tied head likes to repeat its token, and then stop tokens have little to tell.
        checkpoint = trial.tiny(num_hidden_layers=layers, tie_word_embeddings=False)
        asked = _requests(trial, checkpoint)
        with trial.candidate(checkpoint, max_context=max_context(checkpoint)) as engine:
            for request in asked:
                _ask(engine, request)
            ends = _endings(trial, engine, asked[0], checkpoint)
        _judge(trial, checkpoint, asked + ends, "tiny")
        if trial.findings.failures:
            return
    if checkpoint := trial.real():
        prompts = excerpts(checkpoint, trial.rng, 2, 70)
        params = {"max_new_tokens": 20, "logprobs": 4, "ignore_eos": True}
        asked = [Asked(f"{trial.spec.model}, text {i}", p, params) for i, p in enumerate(prompts)]
        with trial.candidate(checkpoint, max_context=256) as engine:
            for request in asked:
                _ask(engine, request)
        _judge(trial, checkpoint, asked, "full")


def _planted(trial: Trial) -> None:
    made = trial.planted()
    lengths = [LOOK_BACK + 1, *(b + int(trial.rng.integers(-1, 2)) for b in (16, 64, 128))]
    prompts = [trial.prompt(length, math.prod(made.sizes)) for length in lengths]
    with trial.candidate(made.folder, max_context=max_context(made.folder)) as engine:
        for prompt in prompts:
            request = Asked(f"planted text, prompt of {len(prompt)}", prompt, PLANTED)
            _ask(engine, request)
            exact_text(trial.findings, request.case, request.results, made, prompt)


def _requests(trial: Trial, checkpoint: Path) -> list[Asked]:
    rng, vocab = trial.rng, ModelDims.from_config(checkpoint).vocab_size
    limit = max_context(checkpoint)
    lengths = sorted({max(1, b + int(rng.integers(-1, 2))) for b in BOUNDARIES})
    lengths.append(int(rng.integers(130, limit - 60)))
    asked = []
    for i, length in enumerate(lengths):
        params: dict[str, Any] = {"max_new_tokens": int(rng.integers(8, 24)), "ignore_eos": True}
        if i % 2:
            seed = int(rng.integers(2**40))
            params |= {"temperature": float(rng.uniform(0.5, 1.5)), "seed": seed}
        params |= {"logprobs": int(rng.integers(1, 21))} if i % 3 == 0 else {}
        case = f"prompt of {length}, {describe(params)}"
        asked.append(Asked(case, trial.prompt(length, vocab), params))
    long = {"max_new_tokens": 50, "ignore_eos": True}  # crosses blocks while decoding
    asked.append(Asked("a long answer", trial.prompt(int(rng.integers(5, 40)), vocab), long))
    return asked


def _ask(engine: EngineProcess, request: Asked) -> None:
    request.results = engine.answer(request.prompt, request.params)


def _endings(trial: Trial, engine: EngineProcess, base: Asked, checkpoint: Path) -> list[Asked]:
    """Stop tokens, end tokens and least lengths; each with what must be seen of it."""
    eos = ModelDims.from_config(checkpoint).eos_token_ids[0]
    greedy = {"max_new_tokens": 12, "ignore_eos": True}
    free = Asked("greedy", base.prompt, greedy)
    _ask(engine, free)
    stop = free.tokens[len(free.tokens) // 2]
    wanted = [*free.tokens[: free.tokens.index(stop) + 1]]
    stopped = Asked("a stop token", base.prompt, greedy | {"stop_token_ids": [stop]})
    forced = Asked(
        "a forced end token", base.prompt, {"max_new_tokens": 12, "logit_bias": {eos: 1e4}}
    )
    ignored = Asked("an ignored end token", base.prompt, forced.params | {"ignore_eos": True})
    kept = Asked("min_tokens", base.prompt, forced.params | {"min_tokens": 5})
    for request in (stopped, forced, ignored, kept):
        _ask(engine, request)
    _ends(trial, stopped, wanted, "stop")
    _ends(trial, forced, [eos], "stop")
    _ends(trial, ignored, [eos] * 12, "length")
    trial.findings.case()
    if kept.tokens[5:] != [eos] or eos in kept.tokens[:5]:
        detail = f"end token {eos}, min_tokens 5: the answer is {kept.tokens}"
        trial.findings.fail(kept.case, detail)
    return [free, stopped, forced, ignored, kept]


def _ends(trial: Trial, request: Asked, tokens: list[int], finish: str) -> None:
    trial.findings.case()
    if request.tokens != tokens:
        detail = f"{describe(request.params)}: the answer is {request.tokens}, wanted {tokens}"
        trial.findings.fail(request.case, detail)
    elif request.results[-1].finish_reason != finish:
        detail = f"finish_reason {request.results[-1].finish_reason!r}, wanted {finish!r}"
        trial.findings.fail(request.case, detail)


def _judge(trial: Trial, checkpoint: Path, asked: list[Asked], depth: Depth) -> None:
    answers = [(request.prompt, request.results) for request in asked]
    ask = trial.ask(checkpoint, depth, answers)
    for request in asked:
        _whole(trial, request)
        judge_text(
            trial.findings, request.case, request.prompt, request.params, request.results, ask
        )


def _whole(trial: Trial, request: Asked) -> None:
    """Exactly one finish reason, on the last token; the number of tokens that was asked for."""
    reasons = [result.finish_reason for result in request.results]
    if not reasons or reasons[-1] is None or any(reasons[:-1]):
        trial.findings.fail(request.case, f"finish reasons are {reasons}")
    elif reasons[-1] == "length" and len(reasons) != request.params["max_new_tokens"]:
        wanted = request.params["max_new_tokens"]
        trial.findings.fail(request.case, f"{len(reasons)} tokens came, {wanted} were asked for")
    elif reasons[-1] not in ("length", "stop"):
        trial.findings.fail(request.case, f"finish_reason {reasons[-1]!r}")

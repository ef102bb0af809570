"""memory: the cache holds what the spec predicts; nothing grows by step or by request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from metainfer_lab.engine import Census, EngineProcess
from metainfer_lab.gates.tolerances import MEMORY
from metainfer_lab.gates.trial import Trial, refused
from metainfer_lab.gates.verdict import Findings
from metainfer_lab.model import ModelDims
from metainfer_lab.roofline import Deployment

BATCH, CONTEXT = 4, 320
PROMPT = 12  # tokens: less than a block, so that no prefix is kept for later
WARM, STEADY = 20, 60  # steps of decode before and between the two looks
REQUESTS = 24  # of a round; BATCH + 1 of them are cancelled


@dataclass(frozen=True)
class Predicted:
    """Bytes of a cache for `batch` sequences of `context` tokens: `least`, or `most` with blocks of
    MEMORY.block positions and a sequence more for padded rows."""

    deployment: Deployment

    @classmethod
    def of(cls, trial: Trial, checkpoint: Path) -> Predicted:
        """In the spec's formats; naive operators, on a CPU, keep everything in float32."""
        asked, naive = trial.spec.precision, trial.device == "cpu"
        kv_cache, activations = ("fp32", "fp32") if naive else (asked.kv_cache, asked.activations)
        dims = ModelDims.from_config(checkpoint)
        state = "fp32" if naive else asked.state
        return cls(Deployment(dims, {}, activations, kv_cache, state, trial.spec.parallel.tp))

    def least(self, batch: int, context: int) -> int:
        """Keys, values and state; convolution tails are left to the engine's own layout."""
        d = self.deployment
        return batch * (context * d.kv_bytes_per_token() + d.state_bytes())

    def most(self, batch: int, context: int) -> int:
        blocks = -(-context // MEMORY.block) + 1
        d = self.deployment
        of_one = blocks * MEMORY.block * d.kv_bytes_per_token() + d.state_bytes()
        return (batch + 1) * (of_one + MEMORY.conv * d.conv_bytes())


def memory(trial: Trial) -> None:
    """Capacity, a steady decode, rounds of short requests, and a cache that was given its size."""
    checkpoint = trial.tiny(max_position_embeddings=CONTEXT)
    predicted = Predicted.of(trial, checkpoint)
    vocab = ModelDims.from_config(checkpoint).vocab_size
    settings = {"max_batch": BATCH, "max_context": CONTEXT}
    with trial.candidate(checkpoint, **settings) as engine:
        _capacity(trial.findings, engine, checkpoint, predicted)
        _steady(trial, engine, predicted, trial.prompt(PROMPT, vocab))
        _rounds(trial, engine, vocab)
        _bounded(trial, engine, checkpoint, predicted, vocab)


def _capacity(
    findings: Findings, engine: EngineProcess, checkpoint: Path, predicted: Predicted
) -> None:
    """What stats() says against the prediction, and what is allocated against what stats() says."""
    findings.case()
    total, held = _total(engine), engine.census().tensor_bytes
    least, most = predicted.least(BATCH, CONTEXT), predicted.most(BATCH, CONTEXT)
    if not least <= total <= most:
        detail = f"{BATCH} requests of {CONTEXT} tokens take {least} to {most} bytes"
        findings.fail("capacity", f"cache_bytes_total is {total}; {detail}")
    findings.case()
    engine.load(checkpoint, max_context=CONTEXT // 2)
    said, allocated = total - _total(engine), held - engine.census().tensor_bytes
    engine.load(checkpoint)
    if not MEMORY.unsaid_least * said <= allocated <= MEMORY.unsaid_most * said:
        detail = f"by its tensors by {allocated} bytes, by stats() by {said}"
        findings.fail("capacity", f"half of the context less shrinks the engine {detail}")


def _steady(trial: Trial, engine: EngineProcess, predicted: Predicted, prompt: list[int]) -> None:
    """One request decodes; between two looks nothing may have been added."""
    tokens = WARM + STEADY + 10
    request = engine.submit(prompt, {"max_new_tokens": tokens, "ignore_eos": True})
    _steps(engine, WARM)
    before = engine.census()
    _steps(engine, STEADY)
    after = engine.census()
    trial.findings.case()
    used = engine.stats().get("cache_bytes_used", 0)
    least = predicted.least(1, PROMPT + WARM + STEADY - MEMORY.late)
    if not least <= used <= predicted.most(1, CONTEXT):
        detail = f"cache_bytes_used is {used} with one request of about {PROMPT + WARM + STEADY}"
        trial.findings.fail("capacity", f"{detail} tokens; that takes {least} at least")
    engine.cancel(request)
    trial.findings.case()
    per_token = predicted.deployment.kv_bytes_per_token()
    grown = after.tensors - before.tensors, after.tensor_bytes - before.tensor_bytes
    if grown[0] > MEMORY.per_step * STEADY or grown[1] > MEMORY.per_step * STEADY * per_token:
        detail = f"{grown[0]} tensors and {grown[1]} bytes more after {STEADY} steps"
        trial.findings.fail("steady decode", detail)
    trial.findings.case()
    if after.device_reserved > before.device_reserved:
        more = after.device_reserved - before.device_reserved
        trial.findings.fail("steady decode", f"{more} bytes more taken from the GPU")


def _rounds(trial: Trial, engine: EngineProcess, vocab: int) -> None:
    """The same round of requests four times: what a round adds, the next ones must not add too."""
    seen: list[tuple[Census, int]] = []
    for _ in range(4):
        _round(trial, engine, vocab)
        seen.append((engine.census(), engine.resident_bytes()))
    findings, stats = trial.findings, engine.stats()
    findings.case()
    for name in ("running", "waiting", "cache_bytes_used"):
        if stats.get(name) != 0:
            detail = f"{name} is {stats.get(name)} after {4 * REQUESTS} requests, none left"
            findings.fail("many requests", detail)
    for name in ("objects", "tensors"):
        findings.case()
        counts = [getattr(census, name) for census, _ in seen]
        grown = [b - a for a, b in pairwise(counts[1:])]
        if min(grown) >= MEMORY.per_request * REQUESTS:
            detail = f"{grown} more Python {name} after each further {REQUESTS} requests"
            findings.fail("many requests", detail)
    findings.case()
    grown = [b - a for a, b in pairwise([resident for _, resident in seen[1:]])]
    if min(grown) > MEMORY.resident:
        findings.fail("many requests", f"{grown} bytes more resident after each {REQUESTS}")


def _round(trial: Trial, engine: EngineProcess, vocab: int) -> None:
    """Short requests of which some are cancelled: while they wait, prefill and decode."""
    params: dict[str, Any] = {"max_new_tokens": 5, "ignore_eos": True}
    requests = [engine.submit(trial.prompt(PROMPT, vocab), params) for _ in range(REQUESTS)]
    for request in (requests[-1], *requests[:BATCH]):  # none of them can have ended by then
        engine.cancel(request)
        engine.step()
    engine.finish()


def _bounded(
    trial: Trial, engine: EngineProcess, checkpoint: Path, predicted: Predicted, vocab: int
) -> None:
    """cache_bytes is a limit: less runs at once, everything ends; too little is refused."""
    limit = predicted.most(2, CONTEXT)
    engine.load(checkpoint, cache_bytes=limit)
    trial.findings.case()
    total = _total(engine)
    if not 0 < total <= limit:
        trial.findings.fail("a given cache", f"cache_bytes {limit}: cache_bytes_total is {total}")
    params = {"max_new_tokens": CONTEXT // 4, "ignore_eos": True}
    for _ in range(2 * BATCH):
        engine.submit(trial.prompt(CONTEXT // 2, vocab), params)
    results = engine.finish()
    trial.findings.case()
    if len(results) != 2 * BATCH * (CONTEXT // 4):
        detail = f"{len(results)} tokens came of {2 * BATCH} requests for {CONTEXT // 4}"
        trial.findings.fail("a given cache", detail)
    tiny = partial(engine.load, checkpoint, cache_bytes=1)
    refused(trial.findings, "a cache of one byte", "cache_bytes", tiny)


def _steps(engine: EngineProcess, count: int) -> list[Any]:
    return [result for _ in range(count) for result in engine.step()]


def _total(engine: EngineProcess) -> int:
    return engine.stats().get("cache_bytes_total", 0)

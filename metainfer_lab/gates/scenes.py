"""Scenes in which a witness sees what only large sizes, long texts or several ranks show."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from metainfer_lab.checkpoints.tiny import draw_dims, tiny_checkpoint
from metainfer_lab.engine import EngineDied, EngineError, EngineProcess
from metainfer_lab.gates.formulas import Draw, known
from metainfer_lab.model import ModelDims

if TYPE_CHECKING:
    from metainfer_lab.gates.witness import World

LONG = 300  # positions: every checkpoint of a world allows them
ROWS = 560  # of an operator
NO_ROWS = {"route", "dequantise_nvfp4"}  # ids and codes: seen in the model's logits
RANKS = 4
MOST_STEPS = 400  # some mutants have always something left to do


def drain(engine: Any) -> list[Any]:
    """Results until nothing is left to do."""
    results: list[Any] = []
    for _ in range(MOST_STEPS):
        results += engine.step()
        stats = engine.stats()
        if not stats["running"] and not stats["waiting"]:
            break
    return results


def long_text(package: ModuleType, world: World) -> dict[str, Any]:
    """Beyond the lengths that other scenes ask: logits, and log-probabilities of three answers."""
    engine = package.load(world.good[0], device="cpu", max_batch=1, max_context=LONG)
    tokens = [token for prompt in world.prompts for token in prompt]
    prompts = [tokens[start:][: LONG - 20] for start in (0, 90, 180)]
    for prompt in prompts:
        engine.submit(prompt, {"max_new_tokens": 20, "ignore_eos": True})
    answers = np.array([result[2] for result in sorted(drain(engine), key=lambda got: got[0])])
    logits = np.asarray(engine.score(prompts[0], range(LONG - 40, LONG - 20)))
    return {"logits": logits, "log-probabilities": answers}


def operators(package: ModuleType, world: World) -> dict[str, np.ndarray]:
    """Naive forms in float64 on many rows and wide ones, [rows, rest]."""
    import torch

    family, found = ModelDims.from_config(world.good[0]).family, {}
    for name in package.OPERATORS.keys() & known(family).keys() - NO_ROWS:
        draw = Draw(np.random.default_rng(world.poison), ROWS, 30, {"hidden_size": 300})
        arrays, scalars = known(family)[name].inputs(draw)
        tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
        result = package.OPERATORS[name].naive(**tensors, **scalars)
        first = result[0] if isinstance(result, tuple) else result
        found[name] = first.numpy().reshape(len(first), -1)
    return found


def allocated(package: ModuleType, world: World) -> dict[str, Any]:
    """Bytes of the tensors of a loaded engine, what it holds under a limit, objects that a round
    of requests leaves."""
    before = _tensor_bytes()
    engine = package.load(world.good[0], device="cpu", max_batch=3, max_context=160)
    taken, total = _tensor_bytes() - before, engine.stats()["cache_bytes_total"]
    counts = []
    for _ in range(3):
        for prompt in world.prompts:
            engine.submit(prompt[:5], {"max_new_tokens": 2, "ignore_eos": True})
        drain(engine)
        gc.collect()
        counts.append(len(gc.get_objects()))
    limit = {"max_batch": 3, "max_context": 160, "cache_bytes": total // 2}
    bounded = package.load(world.good[0], device="cpu", **limit).stats()["cache_bytes_total"]
    left = counts[2] - counts[1] >= len(world.prompts)
    return {"bytes": taken, "objects": left, "under a limit": bounded <= total // 2}


def _tensor_bytes() -> int:
    import torch

    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def ranks(package: ModuleType, world: World) -> dict[str, Any]:
    """Logits and answers of several ranks, and what is said when one is lost; in float32, where a
    fault of ranks is as large as in any format."""
    folder = Path(package.__path__[0])
    if RANKS not in json.loads((folder / "engine.json").read_text()).get("worlds", []):
        return {}
    checkpoint, prompt = _shared(world), world.prompts[1]
    params = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 1.0}
    with EngineProcess(
        folder, checkpoint, world=RANKS, max_context=160, threads=1, timeout_s=60
    ) as engine:
        found: dict[str, Any] = {"logits": engine.score(prompt, range(len(prompt)))}
        engine.submit(prompt, params)
        results = engine.finish()
        tokens = [*prompt, *(result.token for result in results)]
        logits = engine.score(tokens, range(len(prompt) - 1, len(tokens) - 1)).astype(np.float64)
        shifted = logits - logits.max(-1, keepdims=True)
        own = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        right = own[np.arange(len(results)), [result.token for result in results]]
        found["score against step"] = np.array([r.logprob for r in results]) - right
        engine.submit(prompt, params)
        engine.step()
        engine.rank(RANKS - 1).kill()
        found["a lost rank"] = _said(engine)
        engine.kill()
    return found


def _said(engine: EngineProcess) -> str:
    try:
        while engine.step() or engine.stats()["running"]:
            pass
    except (EngineError, EngineDied) as error:
        return type(error).__name__
    return "nothing"


def _shared(world: World) -> Path:
    """A checkpoint that RANKS ranks can share, two of them one key head; made once."""
    folder = world.good[0].parent / "shared"
    if not folder.exists():
        rng, like = np.random.default_rng(world.poison), ModelDims.load("qwen3-tiny")
        heads = {"num_attention_heads": 2 * RANKS, "num_key_value_heads": RANKS // 2}
        sizes = {"hidden_size": 48, "intermediate_size": 64, "vocab_size": 200}
        dims = draw_dims(rng, like, {}, num_hidden_layers=2, **heads, **sizes)
        tiny_checkpoint("qwen3", world.poison, folder, **dims)
    return folder

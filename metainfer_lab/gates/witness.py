"""The witness: in float64 a mutant differs from the right engine by far more than a tolerance.

Both are imported here and do the same things; the first that shows a difference is the witness. A
mutant without one may well be right, and its death would prove nothing.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from metainfer_lab.checkpoints import variants
from metainfer_lab.checkpoints.tiny import draw_dims, tiny_checkpoint
from metainfer_lab.checkpoints.tiny_qwen36 import tiny_qwen36
from metainfer_lab.gates import scenes
from metainfer_lab.gates.tolerances import FIXED
from metainfer_lab.model import ModelDims
from metainfer_lab.oracle import Oracle
from metainfer_lab.paths import ENGINES

FAR = 10.0  # tolerances
CONTEXT, MAX_BATCH, VOCAB = 160, 3, 150
LENGTHS = (1, 30, 130, 5, 120, 140, 40)  # of prompts; two are longer than a step
SEEDED = 100  # draws of one token
BAD_CALLS: tuple[tuple[list[Any], dict[str, Any]], ...] = (
    ([], {}),
    ([5, -1], {}),
    ([VOCAB * 99], {}),
    ([5], {"temperature": math.nan}),
    ([5], {"temperature": math.inf}),
    ([5], {"logit_bias": {0: math.nan}}),
    ([5], {"top_p": 0.0}),
    ([5], {"logprobs": 21}),
)
BAD_LOADS = ({"max_batch": 0}, {"max_context": 10**6}, {"cache_bytes": 16}, {"device": "abacus"})
# Groups of heads that differ from tiles of them, an epsilon that matters: no draw hides a fault.
TELLING = {"num_hidden_layers": 2, "num_key_value_heads": 2, "num_attention_heads": 6}
TELLING |= {"rms_norm_eps": 1e-3}
ONE_TOKEN = {"max_new_tokens": 1, "ignore_eos": True}


class Witness(BaseModel):
    """observable: what shows the difference; departure: in tolerances, None where it is not one of
    size (another token, an error, a count)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    observable: str
    departure: float | None


@dataclass
class World:
    """Checkpoints, good and bad, and all that the right engine does with them."""

    good: list[Path]
    bad: list[Path]
    poisoned: Path
    poison: int
    prompts: list[list[int]]
    right: dict[str, Any]

    @classmethod
    def make(cls, engine: str, folder: Path, oracle: Oracle) -> World:
        """For an engine of data/engines, in a folder that is empty, all of it drawn anew."""
        rng = np.random.default_rng()
        good, beside = _CHECKPOINTS[engine](rng, folder, oracle)
        prompts = [rng.integers(2, VOCAB, length).tolist() for length in LENGTHS]
        poison = int(rng.integers(2, VOCAB))
        world = cls(good, [], folder / "poisoned", poison, prompts, {})
        world.bad = _bad(good[-1], folder, beside)
        variants.edited(good[0], world.poisoned, lambda tensors: _spoil(tensors, poison))
        world.right = dict(observations(import_in_float64(ENGINES / engine), world))
        return world

    def witness(self, folder: Path) -> Witness | None:
        """The first thing that an engine does far otherwise than the right one."""
        for name, value in observations(import_in_float64(folder), self):
            amount = departure(value, self.right.get(name))  # a scene that raises has another name
            if not amount <= FAR:
                return Witness(observable=name, departure=amount if math.isfinite(amount) else None)
        return None


def import_in_float64(folder: Path) -> ModuleType:
    """An engine package under a name of its own that computes in float64."""
    name = f"engine_{secrets.token_hex(4)}"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)
    import torch

    sys.modules[f"{name}.engine"].DTYPE = torch.float64
    return package


def observations(package: ModuleType, world: World) -> Iterator[tuple[str, Any]]:
    """(what, value): arrays of numbers, or values that are equal or are not; cheap ones first."""
    played: dict[str, Callable[[ModuleType, World], Any]] = {
        "logits": _logits,
        "answers in a batch": _served,
        "answers alone": _alone,
        "draws by seed": _drawn,
        "refusals": _refusals,
        "neighbours of NaN": _victims,
        "what is left alive": _left,
        "a long text": scenes.long_text,
        "what is allocated": scenes.allocated,
        "operators at large sizes": scenes.operators,
        "several ranks": scenes.ranks,
    }
    for name, scene in played.items():
        try:
            found = scene(package, world)
        except Exception as error:
            found = {"": f"raised {type(error).__name__}"}
        for part, value in found.items():
            yield f"{name}{part and ', '}{part}", value


def departure(got: Any, want: Any) -> float:
    """How many tolerances apart two values are; infinity where they are not numbers."""
    numbers = isinstance(got, np.ndarray) and isinstance(want, np.ndarray)
    if not numbers or got.shape != want.shape:
        same = not numbers and got == want
        return 0.0 if same else math.inf
    if got.ndim == 1:
        return float((np.abs(got - want) / FIXED["fp32", "tiny"].logprob).max(initial=0))
    error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    return float(error.max() / FIXED["fp32", "tiny"].row)


def _dense(rng: np.random.Generator, folder: Path, _: Oracle) -> tuple[list[Path], str]:
    like, made = ModelDims.load("qwen3-tiny"), []
    for tied in (True, False):
        dims = draw_dims(rng, like, {}, **TELLING, tie_word_embeddings=tied)
        seed = int(rng.integers(2**31))
        made.append(tiny_checkpoint("qwen3", seed, folder / f"tied-{tied}", **dims))
    return made, "model.layers.0.self_attn.q_proj.bias"


def _hybrid(rng: np.random.Generator, folder: Path, oracle: Oracle) -> tuple[list[Path], str]:
    seed = int(rng.integers(2**31))
    made = [
        tiny_qwen36(seed, folder / "plain", wrapped=False),
        tiny_qwen36(seed, folder / "quantised", quantised=True, oracle=oracle),
    ]
    return made, "model.language_model.layers.0.linear_attn.conv1d.bias"


Maker = Callable[[np.random.Generator, Path, Oracle], tuple[list[Path], str]]
_CHECKPOINTS: Mapping[str, Maker] = {
    "qwen3-reference": _dense,
    "qwen3.6-reference": _hybrid,
}


def _bad(source: Path, folder: Path, beside: str) -> list[Path]:
    names = sorted(variants.read_tensors(source))
    made = [variants.with_extra_tensor(source, folder / "extra", beside)]
    for i, ending in enumerate(("norm.weight", "o_proj.weight", "input_scale")):
        for name in [name for name in names if name.endswith(ending)][:1]:
            made.append(variants.without_tensor(source, folder / f"missing-{i}", name))
    weight = next(name for name in names if name.endswith("o_proj.weight"))
    made.append(variants.with_integers(source, folder / "integers", weight))
    made.append(variants.with_shape(source, folder / "shape", weight))
    return [*made, variants.without_shard(source, folder / "shard")[0]]


def _spoil(tensors: dict[str, Any], token: int) -> None:
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors[name][token] = math.nan


def _load(package: ModuleType, checkpoint: Path, **changed: Any) -> Any:
    settings = {"device": "cpu", "max_batch": MAX_BATCH, "max_context": CONTEXT}
    return package.load(checkpoint, **settings | changed)


def _logits(package: ModuleType, world: World) -> dict[str, np.ndarray]:
    return {
        f"{folder.name}, {len(prompt)} tokens": _load(package, folder).score(
            prompt, list(range(len(prompt)))[::-1]
        )
        for folder in world.good
        for prompt in world.prompts[:3]
    }


def _served(package: ModuleType, world: World) -> dict[str, Any]:
    """More requests than fit a batch: some drawn by seed, one cancelled, one at the last token."""
    engine, ids = _load(package, world.good[0]), []
    for i, prompt in enumerate(world.prompts):
        params: dict[str, Any] = {"max_new_tokens": 18, "ignore_eos": True, "logprobs": 3}
        params |= {"temperature": 0.8, "seed": i} if i % 2 else {}
        ids.append(engine.submit(prompt, params))
    ids.append(engine.submit(world.prompts[0], {"logit_bias": {1: 1e4}, "min_tokens": 4}))
    stop = {"stop_token_ids": [7], "logit_bias": {7: 1e4}}
    ids.append(engine.submit(world.prompts[3], stop))
    results, sizes = [], []
    for step in range(400):
        if step == 5:
            engine.cancel(ids[1])
        results += engine.step()
        stats = engine.stats()
        sizes.append([stats[name] for name in ("running", "waiting", "cache_bytes_used")])
        if not any(sizes[-1]):
            break
    texts = [[r for r in results if r[0] == request] for request in ids]
    return {
        "tokens": [[(token, finish) for _, token, _, _, finish in text] for text in texts],
        "log-probabilities": np.array([r[2] for text in texts for r in text]),
        "listed tokens": [[len(top or ()) for _, _, _, top, _ in text] for text in texts],
        "sizes by step": [*sizes, engine.stats()["largest_batch"]],
    }


def _alone(package: ModuleType, world: World) -> dict[str, Any]:
    """One request after the other, each to the edge of the context or nearly."""
    engine, results = _load(package, world.good[0]), []
    for prompt in world.prompts:
        length = CONTEXT if len(prompt) > 100 else 6
        asked = {"max_new_tokens": length, "ignore_eos": True, "logprobs": 20}
        engine.submit(prompt, asked)
        results += scenes.drain(engine)
    return {
        "tokens": [(request, token, finish) for request, token, _, _, finish in results],
        "log-probabilities": np.array([p for r in results for _, p in r[3]]),
    }


def _drawn(package: ModuleType, world: World) -> dict[str, Any]:
    """Single tokens under many seeds; for the penalties among a few tokens, half of the prompt."""
    engine, prompt = _load(package, world.good[0]), world.prompts[1]
    confined = dict.fromkeys([*prompt[:10], *range(20, 30)], 60.0)
    among = {"temperature": 2.0, "logit_bias": confined}
    found: dict[str, Any] = {}
    for name, params in {
        "temperature": {"temperature": 2.0},
        "top_k": {"temperature": 3.0, "top_k": 3},
        "top_p": {"top_p": 0.5} | among | {"temperature": 6.0},
        "min_p": {"temperature": 3.0, "min_p": 0.3},
        "repetition_penalty": {"repetition_penalty": 1.7} | among,
        "presence_penalty": {"presence_penalty": 2.0} | among,
    }.items():
        for seed in range(SEEDED):
            engine.submit(prompt, ONE_TOKEN | params | {"seed": seed})
        found[name] = _finish(engine)
    asked = {"frequency_penalty": 0.4, "max_new_tokens": 24, "ignore_eos": True}
    engine.submit(prompt, asked | {"logit_bias": confined})
    return found | {"frequency_penalty": _finish(engine)}


def _finish(engine: Any) -> list[tuple[int, int]]:
    results = sorted(scenes.drain(engine), key=lambda result: result[0])
    return [(request, token) for request, token, *_ in results]


def _refusals(package: ModuleType, world: World) -> dict[str, Any]:
    engine = _load(package, world.good[0])
    said = [_said(lambda c=call: engine.submit(*c)) for call in BAD_CALLS]
    said += [_said(lambda c=call: engine.score(c[0], [0])) for call in BAD_CALLS[:3]]
    loads = [_said(lambda f=folder: _load(package, f)) for folder in world.bad]
    loads += [_said(lambda c=c: _load(package, world.good[0], **c)) for c in BAD_LOADS]
    return {"of calls": said, "of loads": loads, "after them": engine.stats()}


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "accepted"


def _victims(package: ModuleType, world: World) -> dict[str, Any]:
    """Answers beside, before and after requests that read a row of NaN."""
    engine, ids = _load(package, world.poisoned), []
    params = {"max_new_tokens": 9, "ignore_eos": True, "logit_bias": {world.poison: -1e9}}
    for prompt in world.prompts[:4]:
        engine.submit([world.poison] * 70, params)
        ids.append(engine.submit([t for t in prompt if t != world.poison] or [2], params))
    return {"tokens": [pair for pair in _finish(engine) if pair[0] in ids]}


def _left(package: ModuleType, world: World) -> dict[str, Any]:
    """Tensors that a steady decode and a round of requests add."""
    import torch

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    engine, counts = _load(package, world.good[0]), []
    engine.submit(world.prompts[0], {"max_new_tokens": 60, "ignore_eos": True})
    for _ in range(3):
        for _ in range(15):
            engine.step()
        counts.append(alive())
    _finish(engine)
    for _ in range(2):
        for prompt in world.prompts:
            engine.submit(prompt, ONE_TOKEN)
        _finish(engine)
        counts.append(alive())
    grown = [counts[2] - counts[1], counts[4] - counts[3]]
    return {"tensors": [more >= 4 for more in grown]}

"""Every Qwen3.6 mutant applies, and in float64 it gives other answers by far more than a tolerance.

A third of them each time, on one checkpoint of each kind, fresh seeds; about 12 s. (All of them,
three times over: the least departure was 84 tolerances, of a state in bfloat16.)
"""

import importlib.util
import secrets
import sys

import numpy as np
import pytest
import torch

from metainfer_lab.checkpoints import variants
from metainfer_lab.checkpoints.tiny_qwen36 import tiny_qwen36
from metainfer_lab.gates.mutants import catalogue
from metainfer_lab.gates.tolerances import FIXED
from metainfer_lab.oracle import Oracle
from metainfer_lab.paths import ENGINES

SEED = secrets.randbelow(2**32)
MUTANTS = {mutant.name: mutant for mutant in catalogue("mutants", "qwen3.6")}
PROMPTS = (1, 30, 70, 5, 12, 40)  # lengths; the third is longer than a step
TOLERANCE = FIXED["fp32", "tiny"]


def import_in_float64(folder):
    name = f"engine_{secrets.token_hex(4)}"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)
    sys.modules[f"{name}.engine"].DTYPE = torch.float64
    return package


def load(package, folder):
    return package.load(folder, device="cpu", max_batch=3, max_context=160)


def draw(length):
    return np.random.default_rng([SEED, length]).integers(0, 150, length).tolist()


def served(engine):
    """(token, logprob) of each request, in a batch of three, one cancelled, slots used again."""
    answers = {}
    ids = [
        engine.submit(draw(n), {"max_new_tokens": 8, "ignore_eos": True, "logprobs": 1})
        for n in PROMPTS
    ]
    for step in range(200):
        if step == 2:
            engine.cancel(ids[1])
        for request, token, logprob, _, _ in engine.step():
            answers.setdefault(request, []).append((token, logprob))
    return answers


def refusals(package, folders):
    said = []
    for folder in folders:
        try:
            load(package, folder)
            said.append("loaded")
        except ValueError as error:
            said.append(str(error))
    return said


def behaviour(package, plain, quantised, bad):
    engines = [load(package, folder) for folder in (plain, quantised)]
    scores = [engine.score(draw(60), list(range(60))) for engine in engines]
    return scores, served(engines[0]), refusals(package, bad)


def departure(got, want):
    """How many tolerances apart two behaviours are."""
    (scores, answers, said), (right_scores, right_answers, right_said) = got, want
    if said != right_said:
        return np.inf
    errors = [
        (np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)).max() / TOLERANCE.row
        for a, b in zip(scores, right_scores, strict=True)
    ]
    for request, right in right_answers.items():
        for (token, logprob), (right_token, right_logprob) in zip(
            answers[request], right, strict=True
        ):
            errors.append(abs(logprob - right_logprob) / TOLERANCE.logprob)
            if token != right_token:
                errors.append(1e4)
                break
    return max(errors)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Checkpoints, good and bad, and what the right engine does with them."""
    base = tmp_path_factory.mktemp("world")
    with Oracle() as oracle:
        quantised = tiny_qwen36(SEED, base / "quantised", quantised=True, oracle=oracle)
    plain = tiny_qwen36(SEED, base / "plain", wrapped=False)
    scale = "model.language_model.layers.1.linear_attn.out_proj.input_scale"
    bad = [
        variants.without_tensor(quantised, base / "missing", scale),
        variants.with_extra_tensor(plain, base / "extra", "model.layers.0.linear_attn.conv1d.bias"),
    ]
    folders = (plain, quantised, bad)
    return folders, behaviour(import_in_float64(ENGINES / "qwen3.6-reference"), *folders)


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_applies(name, tmp_path):
    MUTANTS[name].apply(tmp_path / "mutant")


@pytest.mark.parametrize("name", sorted(MUTANTS)[SEED % 3 :: 3])
def test_a_mutant_changes_the_answer(name, world, tmp_path):
    folders, right = world
    package = import_in_float64(MUTANTS[name].apply(tmp_path / "mutant"))
    assert departure(behaviour(package, *folders), right) > 10


def test_the_right_engine_does_not_depart_from_itself(world):
    folders, right = world
    again = import_in_float64(ENGINES / "qwen3.6-reference")
    assert departure(behaviour(again, *folders), right) == 0

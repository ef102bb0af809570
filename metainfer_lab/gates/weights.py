"""weights: each tensor matters and is read right; a bad checkpoint is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from metainfer_lab.checkpoints import variants
from metainfer_lab.engine import EngineError, EngineProcess
from metainfer_lab.gates.compare import Truth, compare_logits, relative_l2
from metainfer_lab.gates.tolerances import LEAST_MOVE, UNREAD_SHARE
from metainfer_lab.gates.trial import Trial, max_context
from metainfer_lab.model import ModelDims

PROMPT = 24  # tokens: enough for attention to have something to choose from


def weights(trial: Trial) -> None:
    """Perturbed, sharded and bad checkpoints, tied and untied heads."""
    for tied in trial.rng.permutation([True, False]):
        checkpoint = trial.tiny(num_hidden_layers=2, tie_word_embeddings=bool(tied))
        _each_tensor(trial, checkpoint, "tied" if tied else "untied")
        _refusals(trial, checkpoint)
        if trial.findings.failures:
            return


def _each_tensor(trial: Trial, checkpoint: Path, head: str) -> None:
    dims = ModelDims.from_config(checkpoint)
    names = list(dims.tensors())
    tokens = trial.prompt(PROMPT, dims.vocab_size)
    positions = list(range(PROMPT))
    made = {"": checkpoint, "shards": variants.edited(checkpoint, trial.new_folder(), _same, 3)}
    for name in names:
        seed = int(trial.rng.integers(2**31))
        made[name] = variants.perturbed(checkpoint, trial.new_folder(), name, seed)
    got: dict[str, np.ndarray] = {}
    with trial.candidate(None, max_context=max_context(checkpoint, PROMPT)) as engine:
        for name, folder in made.items():
            engine.load(folder)
            got[name] = engine.score(tokens, positions)
    truth = {name: trial.ask(folder)(tokens, positions) for name, folder in made.items()}
    for name in made:
        case = f"{head} head, {name or 'unperturbed'}"
        if name in names and (complaint := _unread(name, got, truth)):
            trial.findings.case()
            trial.findings.fail(case, complaint)
        else:
            compare_logits(trial.findings, case, got[name], truth[name], positions)


def _unread(name: str, got: dict[str, np.ndarray], truth: dict[str, Truth]) -> str | None:
    """What is wrong if a perturbed tensor moved the oracle and not the engine."""
    moved = relative_l2(got[name], got[""]).max()
    asked = relative_l2(truth[name].logits, truth[""].logits).max()
    assert asked > LEAST_MOVE, f"perturbing {name} moves the oracle by {asked:.2g} only"
    if moved >= UNREAD_SHARE * asked:
        return None
    return f"perturbing it moves the oracle by {asked:.2g} and the engine by {moved:.2g}"


def _same(tensors: variants.Tensors) -> None:
    """No edit: only the layout changes."""


def _refusals(trial: Trial, checkpoint: Path) -> None:
    dims = ModelDims.from_config(checkpoint)
    names = sorted(dims.tensors())

    def draw() -> str:
        return names[int(trial.rng.integers(len(names)))]

    bad: list[tuple[str, Path, str]] = []  # what, folder, what the error must name

    def add(what: str, make: Callable[..., Path], name: str) -> None:
        bad.append((what, make(checkpoint, trial.new_folder(), name), name))

    add("a missing tensor", variants.without_tensor, draw())
    add("a missing final norm", variants.without_tensor, "model.norm.weight")
    beyond = f"model.layers.{dims.num_hidden_layers}.mlp.up_proj.weight"
    add("a layer too many", variants.with_extra_tensor, beyond)
    add("a bias left over", variants.with_extra_tensor, "model.layers.0.self_attn.q_proj.bias")
    add("a wrong shape", variants.with_shape, draw())
    add("a wrong dtype", variants.with_integers, draw())
    truncated = variants.truncated_file(checkpoint, trial.new_folder())
    bad.append(("a truncated file", truncated, "model.safetensors"))
    bad.append(("a missing shard", *variants.without_shard(checkpoint, trial.new_folder())))
    with trial.candidate(None, max_context=PROMPT) as engine:
        for what, folder, name in bad:
            _refused(trial, engine, what, folder, name)
        engine.load(checkpoint)


def _refused(trial: Trial, engine: EngineProcess, what: str, folder: Path, name: str) -> None:
    trial.findings.case()
    try:
        engine.load(folder)
    except EngineError as error:
        if error.type != "ValueError" or name not in error.text:
            detail = f"wanted a ValueError that names {name}, got {error.type}: {error.text[:200]}"
            trial.findings.fail(what, detail)
        return
    trial.findings.fail(what, f"{name}: the checkpoint was loaded without an error")

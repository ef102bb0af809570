"""weights: each tensor matters and is read right; a bad checkpoint is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from metainfer_lab.checkpoints import variants
from metainfer_lab.gates.compare import Truth, compare_scored, relative_l2
from metainfer_lab.gates.routing import Scored, score
from metainfer_lab.gates.tolerances import LEAST_MOVE, UNREAD_SHARE
from metainfer_lab.gates.trial import Trial, max_context, refused
from metainfer_lab.gates.verdict import Failure, NotJudged
from metainfer_lab.model import ModelDims, disk_tensors
from metainfer_lab.model.tensors import text_prefix

PROMPT = 24  # tokens: enough for attention to have something to choose from
LONGEST = 240  # tokens: every expert has been reached by then
MOST_NAMED = 3  # tensors in one error: who blames all of them has found none
BESIDE = ("model.visual.", "mtp.")  # of the checkpoint, and not of the text


def weights(trial: Trial) -> None:
    """Perturbed, sharded and bad checkpoints, tied and untied heads."""
    if trial.full_width:
        raise NotJudged("the kernels serve full width alone; a CPU judges the loader")
    for tied in trial.rng.permutation(trial.heads):
        checkpoint = trial.tiny(num_hidden_layers=2, tie_word_embeddings=bool(tied))
        _each_tensor(trial, checkpoint, "tied" if tied else "untied")
        _refusals(trial, checkpoint)
        if trial.findings.failures:
            return


def _each_tensor(trial: Trial, checkpoint: Path, head: str) -> None:
    """The checkpoint as it is, in shards, and with some of its tensors perturbed at a time.

    An input scale is the business of engines that round activations; here it changes nothing.
    """
    dims = ModelDims.from_config(checkpoint)
    names = [name for name in _text_tensors(dims) if not name.endswith("input_scale")]
    groups = coded(names) if trial.exact_text else single(names)
    tokens = _telling_prompt(trial, checkpoint, dims)
    made = {"as it is": checkpoint, "in shards": _sharded(trial, checkpoint)}
    for group, members in groups.items():
        seed, folder = int(trial.rng.integers(2**31)), trial.new_folder()
        made[group] = variants.perturbed(checkpoint, folder, members, seed)
    got: dict[str, Scored] = {}
    with trial.candidate(None, max_context=len(tokens)) as engine:
        for what, folder in made.items():
            engine.load(folder)
            got[what] = score(engine, tokens, range(len(tokens)), dims)
    truth: dict[str, Truth] = {}
    first = len(trial.findings.failures)
    for what, folder in made.items():
        case, ask = f"{head} head, {what}", trial.ask(folder)
        found = compare_scored(trial.findings, case, got[what], ask, tokens, dims)
        if found is not None:
            truth[what] = found
        elif what not in groups:
            return
    if trial.exact_text:
        _name_culprit(trial, groups, groups.keys() - truth.keys(), first)
    else:
        _unread(trial, groups.keys() & truth.keys(), got, truth)


def coded(names: Sequence[str]) -> dict[str, list[str]]:
    """Groups such that the set of those that a name is in belongs to it alone, and is not all."""
    bits = (len(names) + 1).bit_length()
    return {
        f"perturbed, group {bit}": [n for code, n in enumerate(names, 1) if code >> bit & 1]
        for bit in range(bits)
    }


def single(names: Sequence[str]) -> dict[str, list[str]]:
    """A group for each name, but one for the same tensor of all experts of a layer."""
    groups: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        key = ".".join("*" if parts[i - 1] == "experts" else p for i, p in enumerate(parts))
        key = key if any(part.isdigit() for part in parts) and "experts" in parts else name
        groups.setdefault(f"{key} perturbed", []).append(name)
    return groups


def _text_tensors(dims: ModelDims) -> list[str]:
    return [name for name in disk_tensors(dims) if not name.startswith(BESIDE)]


def _telling_prompt(trial: Trial, checkpoint: Path, dims: ModelDims) -> list[int]:
    """A prompt over which every parameter moves the logits, those of every expert too."""
    oracle, tokens = trial.oracle(checkpoint), []
    while len(tokens) < max_context(checkpoint, LONGEST):
        tokens += trial.prompt(PROMPT, dims.vocab_size)
        moves = oracle.sensitivity(tokens)
        least = min(moves, key=moves.__getitem__)
        if moves[least] > LEAST_MOVE:
            return tokens
    raise AssertionError(f"perturbing {least} moves the oracle by {moves[least]:.2g} only")


def _name_culprit(trial: Trial, groups: dict[str, list[str]], wrong: set[str], at: int) -> None:
    """Put the tensor that is in all wrong groups and in no other first among the failures."""
    for name in {name for members in groups.values() for name in members}:
        if wrong and {group for group, members in groups.items() if name in members} == wrong:
            detail = "perturbing it, and no other tensor, gives other logits than the oracle's"
            trial.findings.failures.insert(at, Failure(case=name, detail=detail))


def _unread(
    trial: Trial, groups: Iterable[str], got: dict[str, Scored], truth: dict[str, Truth]
) -> None:
    """Rounding may hide what one tensor does: the engine must at least move with the oracle."""
    for group in groups:
        moved = relative_l2(got[group].logits, got["as it is"].logits).max()
        asked = relative_l2(truth[group].logits, truth["as it is"].logits).max()
        trial.findings.case()
        if moved < UNREAD_SHARE * asked:
            detail = f"moves the oracle by {asked:.2g} and the engine by {moved:.2g}"
            trial.findings.fail(group, detail)


def _sharded(trial: Trial, checkpoint: Path) -> Path:
    return variants.edited(checkpoint, trial.new_folder(), lambda tensors: None, shards=3)


def _refusals(trial: Trial, checkpoint: Path) -> None:
    dims = ModelDims.from_config(checkpoint)
    prefix, names = text_prefix(dims), _text_tensors(dims)
    bad: list[tuple[str, Path, str]] = []  # what, folder, what the error must name

    def add(what: str, make: Callable[..., Path], name: str) -> None:
        bad.append((what, make(checkpoint, trial.new_folder(), name), name))

    def draw(end: str = "") -> str:
        return str(trial.rng.choice([name for name in names if name.endswith(end)]))

    add("a missing tensor", variants.without_tensor, draw())
    add("a missing final norm", variants.without_tensor, f"{prefix}norm.weight")
    for end in ("weight_scale", "input_scale") if dims.quantised_layers else ():
        add("a missing scale", variants.without_tensor, draw(end))
    beyond = f"{prefix}layers.{dims.num_hidden_layers}.input_layernorm.weight"
    add("a layer too many", variants.with_extra_tensor, beyond)
    add("a bias left over", variants.with_extra_tensor, draw("proj.weight")[:-6] + "bias")
    add("a wrong shape", variants.with_shape, draw())
    add("a wrong dtype", variants.with_integers, draw())
    truncated = variants.truncated_file(checkpoint, trial.new_folder())
    bad.append(("a truncated file", truncated, "model.safetensors"))
    bad.append(("a missing shard", *variants.without_shard(checkpoint, trial.new_folder())))
    with trial.candidate(None, max_context=PROMPT) as engine:
        for what, folder, name in bad:
            names = _text_tensors(ModelDims.from_config(folder))
            refused(
                trial.findings,
                what,
                name,
                partial(engine.load, folder),
                lambda text, names=names: sum(other in text for other in names) > MOST_NAMED,
            )
        engine.load(checkpoint)

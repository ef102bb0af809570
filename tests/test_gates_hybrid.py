"""The gates on the hybrid family, and what they share with the dense one: routers, coded groups,
planted text. Each verification takes 3 to 6 s on a free machine; about 30 s in all.
"""

import math
import re
import secrets

import numpy as np
import pytest

from metainfer_lab.checkpoints import modelopt, variants
from metainfer_lab.checkpoints.planted import LOOK_BACK
from metainfer_lab.checkpoints.planted_dense import planted_dense
from metainfer_lab.checkpoints.planted_qwen36 import planted_qwen36
from metainfer_lab.checkpoints.tiny_qwen36 import tiny_qwen36
from metainfer_lab.engine import StepResult
from metainfer_lab.gates import verify
from metainfer_lab.gates.compare import exact_text, text_with
from metainfer_lab.gates.mutants import catalogue
from metainfer_lab.gates.routing import best, choice, complaint
from metainfer_lab.gates.tolerances import FIXED, LEAST_MOVE
from metainfer_lab.gates.trial import Trial
from metainfer_lab.gates.verdict import Findings
from metainfer_lab.gates.weights import coded, single
from metainfer_lab.model import ModelDims, disk_tensors
from metainfer_lab.oracle import Oracle
from metainfer_lab.paths import ENGINES
from metainfer_lab.spec import Spec

SEED = secrets.randbelow(2**32)
REFERENCE = ENGINES / "qwen3.6-reference"
PLAIN, QUANTISED = "qwen3.6-tiny-cpu", "qwen3.6-35b-a3b-nvfp4-h200"
MUTANTS = {mutant.name: mutant for mutant in catalogue("mutants", "qwen3.6")}
# A fixed sample: the gate that must kill it, and what its words must say.
SAMPLE = {
    "router-takes-the-next": ("logits", r"layer 0 router"),
    "shared-gate-dropped": ("logits", r"layer 0 shared expert"),
    "fp8-scale-dropped": ("logits", r"layer 0 (DeltaNet|attention)"),
    "missing-input-scale-accepted": ("weights", "input_scale: accepted"),
    "slots-shared": ("batching", r"planted text, request \d+ of 12.*wrong is what"),
}


@pytest.fixture(scope="module")
def rng():
    print("seed", SEED)
    return np.random.default_rng(SEED)


@pytest.fixture(scope="module")
def oracle():
    with Oracle() as running:
        yield running


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tiny_qwen36(SEED, tmp_path_factory.mktemp("plain") / "checkpoint", wrapped=False)


@pytest.mark.parametrize(("spec", "gate"), [(PLAIN, "decode"), (QUANTISED, "weights")])
def test_the_right_engine_passes(spec, gate, monkeypatch):
    """Slow."""
    monkeypatch.setattr(Trial, "real", lambda self: None)
    verdict = verify(REFERENCE, spec=Spec.load(spec), gates=[gate])
    assert verdict.passed, str(verdict)
    assert verdict.gates[0].cases > 15


@pytest.mark.parametrize("name", SAMPLE)
def test_a_wrong_engine_is_killed_in_words(name, tmp_path):
    """Slow."""
    gate, words = SAMPLE[name]
    folder = MUTANTS[name].apply(tmp_path / "wrong")
    verdict = verify(folder, spec=Spec.load(MUTANTS[name].spec), gates=[gate])
    assert not verdict.passed
    assert re.search(words, str(verdict)), str(verdict)


def test_the_oracle_goes_on_with_given_experts(oracle, plain, rng):
    dims = ModelDims.from_config(plain)
    tokens = rng.integers(0, dims.vocab_size, 40).tolist()
    oracle.use(plain)
    own = oracle.routed(tokens, range(40))
    ids = best(own.router, dims.moe.num_experts_per_tok)
    same = oracle.routed(tokens, range(40), ids[..., ::-1])
    assert np.abs(same.logits - own.logits).max() < 1e-12 * np.abs(own.logits).max()
    other = ids.copy()
    other[2, 17, -1] = np.argsort(own.router[2, 17])[0]  # the least likely one
    moved = oracle.routed(tokens, range(40), other)
    changed = np.abs(moved.logits - own.logits).max(axis=-1) > 1e-6
    assert not changed[:17].any() and changed[17:].all()
    assert np.allclose(moved.router[:3], own.router[:3], rtol=0, atol=1e-12)
    assert np.array_equal(oracle.routed(tokens, range(40)).logits, own.logits)


def test_a_choice_of_experts_is_held_to_the_margin(rng):
    router = rng.normal(size=(3, 20, 9))
    ids, allowed = best(router, 3), np.full((3, 20), 1e-3)
    assert (choice(router, ids, allowed).behind < 0).all()
    ranked = np.argsort(-router[1, 5])
    ids[1, 5] = [ranked[0], ranked[1], ranked[3]]  # in place of the third
    made = choice(router, ids, allowed)
    assert made.worst == (1, 5) and made.least[1, 5] == ranked[3]
    router[1, 5, ranked[3]] = router[1, 5, ranked[2]] - 5e-4  # a near tie: either is right
    made = choice(router, ids, allowed)
    assert (made.behind <= made.allowed).all()
    assert set(np.flatnonzero(choice(router, best(router, 3), allowed).unsure)) >= {5}
    ids[1, 5] = [ranked[1], ranked[2], ranked[3]]  # the likeliest one left out
    assert choice(router, ids, allowed).worst == (1, 5)


def test_expert_ids_are_looked_at_as_such(plain, rng):
    moe = ModelDims.from_config(plain).moe
    router = rng.normal(size=(4, 7, moe.num_experts))
    ids, dims = best(router, moe.num_experts_per_tok), ModelDims.from_config(plain)
    assert complaint(ids, dims, 7) is None
    assert "not integers" in complaint(ids.astype(float), dims, 7)
    assert "not integers" in complaint(ids[:, :6], dims, 7)
    strange = ids.copy()
    strange[2, 3, 0] = moe.num_experts
    assert "not among" in complaint(strange, dims, 7)
    strange[2, 3, 0] = strange[2, 3, 1]
    assert "layer 2, token 3: an expert is there twice" in complaint(strange, dims, 7)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 8, 62, 200])
def test_coded_groups_tell_every_tensor_apart(count):
    names = [str(i) for i in range(count)]
    groups = coded(names)
    codes = [frozenset(g for g, members in groups.items() if n in members) for n in names]
    assert len(set(codes)) == count and all(codes)
    assert frozenset(groups) not in codes, "all groups wrong is no single tensor's fault"


def test_single_groups_join_experts_alone():
    layer = "model.layers.1.mlp."
    names = [f"{layer}experts.{e}.up_proj.{t}" for e in range(3) for t in ("weight", "scale")]
    names += ["model.layers.1.mlp.gate.weight", "lm_head.weight"]
    groups = single(names)
    assert len(groups) == 4 and groups[f"{layer}experts.*.up_proj.scale perturbed"] == names[1:6:2]


def test_every_parameter_moves_the_oracle(oracle, plain, rng):
    """The first-order estimate promises no more than perturbing really does (which besides may send
    tokens to other experts)."""
    dims = ModelDims.from_config(plain)
    tokens = rng.integers(0, dims.vocab_size, 200).tolist()
    oracle.use(plain)
    moves, before = oracle.sensitivity(tokens), oracle.logits(tokens, range(200))
    experts = [name for name in moves if "experts." in name]
    assert len(experts) == 2 * 4 * dims.moe.num_experts
    assert min(moves.values()) > LEAST_MOVE
    for name in rng.choice([n for n in dims.tensors() if n in moves], 4, replace=False):
        changed = variants.perturbed(plain, plain.parent / str(name), [name], SEED)
        oracle.use(changed)
        moved = np.linalg.norm(oracle.logits(tokens, range(200)) - before)
        assert moved / np.linalg.norm(before) > moves[name] / 2, name


def test_blocks_are_known_by_the_matrix_that_ends_them(plain):
    dims = ModelDims.from_config(plain)
    kinds = ["linear_attn"] * 3 + ["self_attn"]
    wanted = {f"{i}.{kind}" for i, mixer in enumerate(kinds) for kind in (mixer, "mlp.experts")}
    wanted |= {f"{i}.mlp.shared_expert" for i in range(4)}
    assert {variants.block_of(name) for name in disk_tensors(dims)} - {None} == wanted
    one = "model.language_model.layers.7.mlp.experts.12.down_proj."
    assert variants.block_of(f"{one}weight") == "7.mlp.experts"
    assert variants.block_of(f"{one}weight_scale") is None
    assert variants.block_of("mtp.layers.0.mlp.experts.down_proj") is None
    assert variants.block_of("model.layers.3.mlp.down_proj.weight") == "3.mlp"


def planted(kind, folder, oracle):
    if kind in ("plain", "quantised"):
        return planted_qwen36(SEED, folder, quantised=kind == "quantised", oracle=oracle)
    return planted_dense(SEED, folder, ModelDims.load(kind))


@pytest.mark.parametrize("kind", ["plain", "quantised", "qwen3-8b", "smollm2-135m"])
def test_planted_text_is_sure_in_bfloat16(kind, oracle, tmp_path, rng):
    """The margin is many times what rounding changes, at every token of a long text."""
    made = planted(kind, tmp_path / "made", oracle)
    computed = made.folder
    if kind == "quantised":
        computed = modelopt.dequantised_checkpoint(made.folder, tmp_path / "computed")
    oracle.use(computed)
    count = math.prod(made.sizes)
    prompt = rng.integers(0, count, LOOK_BACK + 1).tolist()
    text = made.text(prompt, 150)
    positions = range(len(prompt) - 1, len(prompt) + 149)
    exact, rounded = (
        oracle.logits([*prompt, *text], positions, how)[:, :count] for how in (None, "bfloat16")
    )
    rows = np.arange(150)
    margin = exact[rows, text].copy()
    exact_others = exact.copy()
    exact_others[rows, text] = -np.inf
    margin -= exact_others.max(axis=-1)
    assert margin.min() > 5 * np.abs(rounded - exact).max()
    assert len(set(text)) > 20


def test_planted_text_that_departs_names_the_part(tmp_path, oracle):
    made = planted("qwen3-8b", tmp_path / "made", oracle)
    prompt = list(range(10))
    said = [StepResult(0, t, 0.0, None, None) for t in made.text(prompt, 8)]
    findings = Findings()
    exact_text(findings, "case", said, made, prompt)
    assert not findings.failures
    tail = made.sizes[1]
    said[3] = said[3]._replace(token=said[3].token // tail * tail + (said[3].token + 1) % tail)
    exact_text(findings, "case", said, made, prompt)
    assert findings.failures[0].position == 3
    assert findings.failures[0].detail.endswith("wrong is what attention found")
    assert "never said" in made.departure(60, 3)


def test_router_margins_exceed_what_float32_costs(oracle, plain, rng):
    """Of the difference of two router logits; and hardly any token is left unasked."""
    dims = ModelDims.from_config(plain)
    tokens = rng.integers(0, dims.vocab_size, 250).tolist()
    oracle.use(plain, "float32")
    narrow = oracle.routed(tokens, [0])
    oracle.use(plain, "float64")
    exact = oracle.routed(tokens, [0])
    margin = FIXED["fp32", "tiny"].router
    errors = np.abs(narrow.router - exact.router).max(axis=-1)
    assert 4 * np.quantile(errors, 0.95) < margin
    ids = best(exact.router, dims.moe.num_experts_per_tok)
    unsure = choice(exact.router, ids, np.full(ids.shape[:2], margin)).unsure
    assert unsure.mean() < 0.02


def test_a_large_checkpoint_is_streamed_where_there_is_a_gpu(monkeypatch, plain, tmp_path):
    started = []

    class Recorder:
        def __init__(self, **settings):
            started.append(settings)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def use(self, checkpoint, dtype):
            started.append((checkpoint, dtype))

    monkeypatch.setattr("metainfer_lab.gates.trial.Oracle", Recorder)
    trial = Trial(REFERENCE, Spec.load(QUANTISED), "cuda", "none", tmp_path)
    trial.oracle(plain)
    monkeypatch.setattr("metainfer_lab.gates.trial.SMALL_BYTES", 1)
    trial.oracle(plain, "float32")
    streamed = {"device": "cuda", "streamed": True}
    assert started == [{}, (plain, "float64"), streamed, (plain, "float32")]
    trial.end()


def test_on_a_gpu_the_answers_of_a_checkpoint_share_the_oracles_passes(tmp_path):
    trial = Trial(REFERENCE, Spec.load(QUANTISED), "cuda", "none", tmp_path)
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    with Oracle() as trial._oracle:
        folder = tiny_qwen36(9, tmp_path / "c", quantised=True, oracle=trial._oracle, **layers)
        answers = [
            (trial.prompt(n, 64), [StepResult(0, t, -1.0, None, None) for t in trial.prompt(m, 64)])
            for n, m in ((3, 9), (40, 1), (17, 0))
        ]
        together, alone = trial.ask(folder, answers=answers), trial.ask(folder)
        for prompt, results in answers[:2]:
            text = text_with(prompt, results)
            one, other = alone(*text), together(*text)
            assert len(one.logits) == len(results)
            assert np.abs(one.logits - other.logits).max() < 1e-9
            assert np.allclose(one.choice.allowed, other.choice.allowed)
            assert one.unsure == other.unsure
        with pytest.raises(KeyError):
            together([1, 2], [1])

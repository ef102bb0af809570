"""The plain Qwen3.6 engine: against the oracle, against itself in pieces, formula by formula.

Fresh seeds every time. About 20 s.
"""

import importlib.util
import math
import secrets
import sys

import numpy as np
import pytest
import torch

from metainfer_lab.checkpoints import fp8, modelopt, nvfp4, variants
from metainfer_lab.checkpoints.planted_qwen36 import planted_qwen36
from metainfer_lab.checkpoints.tiny_qwen36 import tiny_qwen36
from metainfer_lab.engine import Engine
from metainfer_lab.gates.formulas import KNOWN, Draw
from metainfer_lab.oracle import Oracle
from metainfer_lab.paths import ENGINES

FOLDER = ENGINES / "qwen3.6-reference"
SEED = secrets.randbelow(2**32)
GREEDY = {"max_new_tokens": 12, "ignore_eos": True, "logprobs": 20}


def import_engine():
    where = [str(FOLDER)]
    spec = importlib.util.spec_from_file_location(
        "reference_qwen36", FOLDER / "__init__.py", submodule_search_locations=where
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = package
    spec.loader.exec_module(package)
    return package


package = import_engine()
engine_module = sys.modules["reference_qwen36.engine"]
formats = sys.modules["reference_qwen36.formats"]
operators = sys.modules["reference_qwen36.operators"]


@pytest.fixture(scope="module")
def oracle():
    with Oracle() as running:
        yield running


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tiny_qwen36(SEED, tmp_path_factory.mktemp("plain") / "checkpoint")


@pytest.fixture(scope="module")
def quantised(oracle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantised") / "checkpoint"
    return tiny_qwen36(SEED, folder, quantised=True, oracle=oracle)


def load(folder, max_batch=4, max_context=256, **settings):
    arguments = {"max_batch": max_batch, "max_context": max_context} | settings
    return package.load(folder, device="cpu", **arguments)


def draw(length, seed=SEED):
    return np.random.default_rng(seed).integers(0, 150, length).tolist()


def run(engine):
    results = []
    while engine.running or engine.waiting:
        results += engine.step()
    return results


def distance(got, want):
    return (np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)).max()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-7)], ids=str
)
@pytest.mark.parametrize("kind", ["plain", "quantised"])
def test_logits_are_those_of_the_oracle(
    kind, dtype, tolerance, oracle, request, tmp_path, monkeypatch
):
    """In float64 what is left is the rounding of the returned logits to float32."""
    monkeypatch.setattr(engine_module, "DTYPE", dtype)
    folder = request.getfixturevalue(kind)
    tokens, positions = draw(180), list(range(180))
    got = load(folder).score(tokens, positions)
    if kind == "quantised":
        folder = modelopt.dequantised_checkpoint(folder, tmp_path / "plain")
    oracle.use(folder, "float64")
    assert got.dtype == np.float32
    assert distance(got, oracle.logits(tokens, positions)) < tolerance


@pytest.mark.parametrize("layers", [["linear_attention"], ["full_attention"]])
def test_one_layer_of_each_kind(layers, oracle, tmp_path):
    folder = tiny_qwen36(SEED + 1, tmp_path / "one", layer_types=layers, wrapped=False)
    with pytest.raises(ValueError, match="cache_bytes: 16 do not hold"):
        load(folder, cache_bytes=16)
    engine = load(folder, cache_bytes=10**6)
    oracle.use(folder, "float64")
    want = oracle.logits(draw(90), list(range(90)))
    assert distance(engine.score(draw(90), list(range(90))), want) < 1e-5
    engine.submit(draw(90), GREEDY)
    assert len(run(engine)) == 12


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_any_split_of_prefill_and_decode_give_the_same(chunk, plain, monkeypatch):
    monkeypatch.setattr(engine_module, "STEP_TOKENS", chunk)
    engine, prompt = load(plain), draw(41)
    engine.submit(prompt, GREEDY)
    results = run(engine)
    tokens = [result[1] for result in results]
    logits = engine.score(prompt + tokens, list(range(40, 40 + len(tokens))))
    want = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    assert tokens == want.argmax(axis=-1).tolist()
    for row, (_, _, logprob, top, _) in zip(want, results, strict=True):
        assert abs(row.max() - logprob) < 1e-4
        assert max(abs(row[token] - value) for token, value in top) < 1e-4


def test_neighbours_cancels_and_slots_used_again_change_nothing(plain):
    prompts = [draw(length, SEED + length) for length in (1, 5, 70, 23, 40, 3, 64, 90)]
    alone = []
    for prompt in prompts:
        engine = load(plain, max_batch=1)
        engine.submit(prompt, GREEDY)
        alone.append([result[1] for result in run(engine)])
    engine, answers = load(plain, max_batch=3), {}
    ids = [engine.submit(prompt, GREEDY) for prompt in prompts]
    for step in range(4):
        for result in engine.step():
            answers.setdefault(result[0], []).append(result[1])
        if step == 1:
            engine.cancel(ids[2])
    for result in run(engine):
        answers.setdefault(result[0], []).append(result[1])
    for i, identity in enumerate(ids):
        assert i == 2 or answers[identity] == alone[i]
    stats = engine.stats()
    assert stats["cache_bytes_used"] == 0 < stats["cache_bytes_total"]
    assert stats["largest_batch"] == 3


def test_experts_are_reported_and_counted(plain, oracle):
    engine, tokens = load(plain), draw(100)
    _, ids = engine.score(tokens, [99], routing=True)
    config = engine.config
    assert ids.shape == (4, 100, config.num_experts_per_tok)
    for layer in ids:  # each expert is reached, and which ones differs from token to token
        assert len(np.unique(layer)) == config.num_experts
        assert len(np.unique(np.sort(layer, axis=1), axis=0)) > 20
    engine.submit(tokens[:1], {"max_new_tokens": 1})
    run(engine)
    assert engine.stats()["experts_touched"] == config.num_experts_per_tok


def test_gates_and_decays_take_their_range(plain, monkeypatch):
    seen = {"decay": [], "beta": [], "logits": []}
    model_module = sys.modules["reference_qwen36.model"]

    def delta_rule(q, k, v, g, beta, state):
        seen["decay"].append(g.exp())
        seen["beta"].append(beta)
        return operators.gated_delta_rule(q, k, v, g, beta, state)

    monkeypatch.setattr(model_module, "gated_delta_rule", delta_rule)
    load(plain).score(draw(150), [0])
    decay, beta = torch.stack(seen["decay"]), torch.stack(seen["beta"])
    assert decay.min() < 0.4 and decay.max() > 0.99
    assert ((decay > 0.5) & (decay < 0.95)).float().mean() > 0.15
    assert beta.min() < 0.2 and beta.max() > 0.8 and 0.3 < beta.mean() < 0.7


@pytest.mark.parametrize("kind", ["plain", "quantised"])
def test_bad_checkpoints_are_refused_by_the_tensor(kind, request, tmp_path):
    folder = request.getfixturevalue(kind)
    names = [
        name for name in variants.read_tensors(folder) if not name.startswith(("mtp", "model.v"))
    ]
    name = names[secrets.randbelow(len(names))]
    made = {
        "is missing": variants.without_tensor(folder, tmp_path / "missing", name),
        "has shape": variants.edited(folder, tmp_path / "shape", lambda t: longer(t, name)),
        "has dtype": variants.edited(folder, tmp_path / "dtype", lambda t: integers(t, name)),
    }
    for words, bad in made.items():
        with pytest.raises(ValueError, match=f"tensor {name} {words}"):
            load(bad)
    extra = variants.with_extra_tensor(folder, tmp_path / "extra", "model.layers.0.mlp.gate.bias")
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.gate\.bias is left over"):
        load(extra)


def longer(tensors, name):
    tensors[name] = torch.zeros((*tensors[name].shape, 2), dtype=tensors[name].dtype)


def integers(tensors, name):
    tensors[name] = torch.zeros(tensors[name].shape, dtype=torch.int32)


def test_wrong_configs_are_refused_by_the_field(plain, tmp_path):
    text = (plain / "config.json").read_text()
    for i, (old, new, field) in enumerate(
        [
            ('"attn_output_gate": true', '"attn_output_gate": false', "attn_output_gate"),
            ('"rope_type": "default"', '"rope_type": "yarn"', "rope_parameters"),
            ('"model_type": "qwen3_5_moe_text"', '"model_type": "qwen3_next"', "model_type"),
            ('"full_attention"', '"sliding_attention"', "layer_types"),
            ('"hidden_act": "silu"', '"hidden_act": "gelu"', "hidden_act"),
        ]
    ):
        bad = tmp_path / str(i)
        bad.mkdir()
        assert old in text
        (bad / "config.json").write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=f"^{field}: "):
            load(bad)


def test_the_recurrence_is_the_chunked_form():
    """Yang et al. 2024, equations of the chunk: a triangular system in place of the steps."""
    drawn = Draw(np.random.default_rng(SEED), rows=9, context=0, granules={})
    arrays, _ = KNOWN["gated_delta_rule"].inputs(drawn)
    inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    q, k, v, g, beta, state = inputs.values()
    group = v.shape[1] // k.shape[1]
    unit = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)]
    q, k = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in unit)
    q, v, c = q / math.sqrt(q.shape[2]), v.transpose(0, 1), g.T.cumsum(1)
    beta = beta.T[..., None]
    decay = (c[:, :, None] - c[:, None, :]).exp().tril()
    system = torch.eye(v.shape[1]) + (beta * k @ k.mT * decay).tril(-1)
    fresh = torch.linalg.solve(system.double(), beta * (v - c.exp()[..., None] * (k @ state)))
    outputs = c.exp()[..., None] * (q @ state) + (q @ k.mT * decay) @ fresh
    left = (c[:, -1:] - c).exp()[..., None] * k
    last = c[:, -1].exp()[:, None, None] * state + left.mT @ fresh
    got = operators.gated_delta_rule(**inputs)
    assert torch.allclose(got[0], outputs.transpose(0, 1), rtol=0, atol=1e-12)
    assert torch.allclose(got[1], last, rtol=0, atol=1e-12)


def test_equal_router_logits_go_to_the_lowest_ids():
    weights, ids = operators.route(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 2.0]]), 3)
    assert ids.tolist() == [[1, 2, 3]] and torch.allclose(weights, torch.full((1, 3), 1 / 3))


def test_formats_are_those_of_the_quantisers():
    weight = torch.randn(12, 64)
    for dtype in (torch.float32, torch.float64):
        four = nvfp4.quantise(weight, nvfp4.default_global_scale(weight) * 2.0**12)
        got = formats.dequantise_nvfp4(four.codes, four.block_scale, four.global_scale, dtype)
        assert torch.equal(got, four.dequantise(dtype))
        eight = fp8.quantise(weight)
        assert torch.equal(
            formats.dequantise_fp8(eight.codes, eight.scale, dtype), eight.dequantise(dtype)
        )


def test_it_answers_in_its_own_process():
    with Engine.open(FOLDER) as engine:
        said = engine.chat("hello", max_new_tokens=5, on_text=lambda text: None)
        again = engine.chat("hello", max_new_tokens=5, on_text=lambda text: None)
        _, ids = engine.process.score([1, 2, 3], [2], routing=True)
    assert said.tokens == again.tokens and 1 <= len(said.tokens) <= 5
    assert ids.shape == (4, 3, 2)


@pytest.mark.parametrize("kind", ["plain", "quantised"])
def test_planted_text_is_said_to_the_letter(kind, oracle, tmp_path):
    made = planted_qwen36(SEED, tmp_path / "planted", quantised=kind == "quantised", oracle=oracle)
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(0, 200, length).tolist() for length in (6, 20, 75, 150, 33)]
    engine, answers = load(made.folder, max_batch=3), {}
    for prompt in prompts:
        engine.submit(prompt, {"max_new_tokens": 40, "ignore_eos": True})
    for request, token, logprob, _, _ in run(engine):
        answers.setdefault(request, []).append(token)
        assert logprob > math.log(0.5)
    assert list(answers.values()) == [made.text(prompt, 40) for prompt in prompts]
    assert len({token for answer in answers.values() for token in answer}) > 40

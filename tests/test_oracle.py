"""The oracle against the plain engine in float64: two independent programs, one answer."""

import importlib.util
import sys

import numpy as np
import pytest
import torch

from metainfer_lab.checkpoints.modelopt import dequantised_checkpoint
from metainfer_lab.checkpoints.tiny import draw_dims, tiny_checkpoint
from metainfer_lab.checkpoints.tiny_qwen36 import tiny_qwen36
from metainfer_lab.errors import InputError
from metainfer_lab.model import ModelDims
from metainfer_lab.oracle import Oracle
from metainfer_lab.oracle.streamed import StreamedService, Weights
from metainfer_lab.paths import ENGINES


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    like = ModelDims.load("qwen3-8b")
    drawn = draw_dims(np.random.default_rng(), like, {}, num_hidden_layers=2)
    return tiny_checkpoint("qwen3", 17, tmp_path_factory.mktemp("oracle") / "c", **drawn)


@pytest.fixture(scope="module")
def oracle(checkpoint):
    with Oracle(checkpoint) as started:
        yield started


def in_float64(checkpoint, tokens):
    folder = ENGINES / "qwen3-reference"
    name = "reference64"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    place = torch.device("cpu")
    config = module.engine.Config.read(checkpoint)
    group = module.engine.Group.join(0, 1, config, place)
    weights = module.engine.weights.read(checkpoint, config, place, torch.float64, group)
    model = module.model.Model(config, weights, 64, group)
    cache = module.cache.NoCache()
    hidden = model.forward([module.model.Sequence(tokens, 0, [])], cache)
    return (hidden @ weights["lm_head.weight"].T).numpy()


def test_float64_agrees_with_the_formulas_to_float64(checkpoint, oracle):
    vocab = ModelDims.from_config(checkpoint).vocab_size
    tokens = np.random.default_rng().integers(0, vocab, 50).tolist()
    want = oracle.logits(tokens, range(50))
    got = in_float64(checkpoint, tokens)
    assert want.dtype == np.float64
    assert np.abs(got - want).max() < 1e-11


def test_rounding_costs_about_a_percent_and_leaves_no_trace(checkpoint, oracle):
    tokens = list(range(30))
    exact = oracle.logits(tokens, [29, 3, 29])
    for rounding in ("symmetric", "asymmetric"):
        rounded = oracle.logits(tokens, [29, 3, 29], rounding)
        error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
        assert 1e-3 < error < 0.3
    assert np.array_equal(oracle.logits(tokens, [29, 3, 29]), exact)
    assert np.array_equal(exact[0], exact[2])


def test_a_checkpoint_that_is_none_is_named(tmp_path, oracle, checkpoint):
    with pytest.raises(InputError, match="nothing-here"):
        oracle.use(tmp_path / "nothing-here")
    oracle.use(checkpoint)


@pytest.mark.parametrize("kind", ["dense", "tied", "hybrid", "quantised"])
def test_layer_by_layer_it_says_the_same(kind, checkpoint, oracle, tmp_path):
    folder = computed = checkpoint
    if kind == "tied":
        tied = draw_dims(np.random.default_rng(), ModelDims.load("smollm2-135m"), {})
        folder = computed = tiny_checkpoint("llama", 3, tmp_path / "c", **tied)
    if kind in ("hybrid", "quantised"):
        layers = ["linear_attention", "full_attention", "linear_attention"]
        quantised = kind == "quantised"
        folder = computed = tiny_qwen36(
            5, tmp_path / "c", quantised=quantised, oracle=oracle, layer_types=layers
        )
        if quantised:
            computed = dequantised_checkpoint(folder, tmp_path / "plain")
    tokens = np.random.default_rng().integers(0, 150, 60).tolist()
    oracle.use(computed, "float64")
    whole = oracle.routed(tokens, range(60))
    with Oracle(folder, streamed=True) as streamed:
        first, second = (streamed.routed(tokens, range(60)) for _ in range(2))
        rounded = streamed.logits(tokens, [7], "bfloat16")
    assert np.abs(first.logits - whole.logits).max() < 1e-11
    assert np.array_equal(first.logits, second.logits)
    assert np.allclose(rounded, oracle.logits(tokens, [7], "bfloat16"), rtol=0, atol=1e-9)
    if first.router is not None:
        assert np.abs(first.router - whole.router).max() < 1e-11


def test_layer_by_layer_no_layer_stays(checkpoint):
    """One layer at most has weights at any time, and none when the answer is there."""
    service, seen = StreamedService(), []
    service.use(str(checkpoint), "float32")
    layers = service.model.model.layers

    def count(*_):
        seen.append(sum(p.device.type != "meta" for layer in layers for p in layer.parameters()))

    for layer in layers:
        layer.register_forward_pre_hook(count)
    service.logits([[3, 1, 2]], [[2]])
    count()
    each = len(list(layers[0].parameters()))
    assert seen == [each] * len(layers) + [0]


def test_layer_by_layer_a_gpu_with_room_reads_each_tensor_once(tmp_path, oracle, monkeypatch):
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    folder = tiny_qwen36(5, tmp_path / "c", quantised=True, oracle=oracle, **layers)
    source, read = Weights(folder, torch.device("cpu"), torch.float64), []
    get = type(source.files).__getitem__
    monkeypatch.setattr(
        type(source.files), "__getitem__", lambda files, name: read.append(name) or get(files, name)
    )
    source.keeps = True
    first, second = source.of(1), source.of(1)
    assert first.keys() == second.keys() and len(read) == len(set(read)) > 20
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_texts_in_one_pass_are_answered_as_alone(tmp_path, oracle):
    """Of other lengths, in any number, with experts of their own; the hybrid keeps a state too."""
    kinds = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    oracle.use(tiny_qwen36(7, tmp_path / "c", **kinds), "float64")
    rng = np.random.default_rng()
    texts = [(rng.integers(0, 150, n).tolist(), [n - 1, 0]) for n in (5, 70, 33)]
    for how in (None, "bfloat16"):
        alone = [oracle.routed(*text, None, how) for text in texts]
        for one, other in zip(alone, oracle.together(texts, None, how), strict=True):
            assert np.abs(one.logits - other.logits).max() < 1e-9
            assert one.router.shape == other.router.shape
            assert np.abs(one.router - other.router).max() < 1e-9
    chosen = [np.argsort(one.router)[..., :2] for one in alone]
    forced = oracle.together(texts, chosen)
    for text, experts, other in zip(texts, chosen, forced, strict=True):
        assert np.abs(oracle.routed(*text, experts).logits - other.logits).max() < 1e-9

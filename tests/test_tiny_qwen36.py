"""Small Qwen3.6 checkpoints: true layout, drawn within granules, calibrated. About 12 s."""

import json
import secrets

import numpy as np
import pytest
import torch
from safetensors import safe_open

from metainfer_lab.checkpoints import modelopt, seeded
from metainfer_lab.checkpoints.tiny_qwen36 import shallow_config, tiny_qwen36, truncated
from metainfer_lab.checkpoints.variants import read_tensors
from metainfer_lab.model import ModelDims, disk_tensors
from metainfer_lab.oracle import Oracle
from metainfer_lab.paths import MODELS, tree_hash

SEED = secrets.randbelow(2**32)


@pytest.fixture(scope="module")
def oracle():
    with Oracle() as running:
        yield running


@pytest.fixture(scope="module")
def quantised(oracle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantised") / "checkpoint"
    return tiny_qwen36(SEED, folder, quantised=True, oracle=oracle)


def headers(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                view = file.get_slice(name)
                found[name] = tuple(view.get_shape()), view.get_dtype()
    return found


def assert_layout(folder):
    expected, found = disk_tensors(ModelDims.from_config(folder)), headers(folder)
    assert set(found) == set(expected)
    for name, (shape, dtype) in found.items():
        assert shape == expected[name].shape and expected[name].accepts(dtype), name


def test_plain_checkpoints_have_every_tensor_and_an_index(tmp_path):
    for wrapped in (False, True):
        folder = tiny_qwen36(SEED, tmp_path / str(wrapped), wrapped=wrapped)
        assert_layout(folder)
        assert len(list(folder.glob("*.safetensors"))) == 2
        weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        assert set(weight_map) == set(headers(folder))
        assert any(name.startswith("model.visual.") for name in weight_map) == wrapped


def test_quantised_checkpoints_have_the_published_layout(quantised):
    assert_layout(quantised)
    config = json.loads((quantised / "config.json").read_text())
    beside = json.loads((quantised / "hf_quant_config.json").read_text())["quantization"]
    assert beside["quantized_layers"] == config["quantization_config"]["quantized_layers"]
    assert beside["quant_algo"] == "MIXED_PRECISION"
    assert {dtype for _, dtype in headers(quantised).values()} == {"BF16", "U8", "F8_E4M3", "F32"}


def test_the_mix_is_that_of_the_published_model():
    config = json.loads((MODELS / "qwen3.6-35b-a3b" / "config.json").read_text())
    published = json.loads((MODELS / "qwen3.6-35b-a3b-nvfp4" / "config.json").read_text())
    made = modelopt.quantised_config(config)
    assert made == published
    forms = list(modelopt.mixed_layers(ModelDims.from_config(config)).values())
    assert (forms.count("fp8"), forms.count("nvfp4")) == (130, 161)


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    first, second, other = (
        tiny_qwen36(seed, tmp_path / str(i)) for i, seed in enumerate((SEED, SEED, SEED + 1))
    )
    assert tree_hash(first) == tree_hash(second) != tree_hash(other)


def test_dimensions_keep_to_granules(tmp_path):
    granules = {"hidden_size": 32, "linear_key_head_dim": 32, "num_experts": 8, "head_dim": 64}
    shipped = [ModelDims.load(name) for name in ("qwen3.6-tiny", "qwen3.6-35b-a3b")]
    for seed in range(6):
        folder = tiny_qwen36(SEED + seed, tmp_path / str(seed), granules=granules, vocab_size=77)
        dims = ModelDims.from_config(folder)
        assert dims.hidden_size % 32 == dims.gdn.key_head_dim % 32 == dims.head_dim % 64 == 0
        assert dims.moe.num_experts % 8 == 0 and dims.vocab_size == 77
        assert dims.moe.num_experts not in [other.moe.num_experts for other in shipped]


def test_scales_take_their_whole_range(quantised):
    tensors = read_tensors(quantised)
    blocks = torch.cat(
        [
            t.float().flatten()
            for name, t in tensors.items()
            if name.endswith("weight_scale") and t.ndim
        ]
    )
    assert blocks.min() == 2.0**-9 and blocks.max() == 448
    assert (blocks < 2.0**-6).float().mean() > 0.02  # E4M3's subnormals
    scales = torch.stack([t for name, t in tensors.items() if name.endswith("weight_scale_2")])
    assert len(scales.unique()) > len(scales) / 2 and scales.max() > 1000 * scales.min()


def test_input_scales_are_those_of_a_forward_pass(quantised):
    tensors = read_tensors(quantised)
    scale = {
        name[: -len(".input_scale")]: t for name, t in tensors.items() if "input_scale" in name
    }
    layer = "model.language_model.layers.3.self_attn."
    assert scale[layer + "q_proj"] == scale[layer + "k_proj"] == scale[layer + "v_proj"]
    assert scale[layer + "o_proj"] != scale[layer + "q_proj"]
    amax = {
        name: t * 448 * (6 if "mlp" in name or "head" in name else 1) for name, t in scale.items()
    }
    assert all(1e-3 < value < 100 for value in amax.values())
    experts = [float(t) for name, t in scale.items() if ".experts." in name]
    assert len(np.unique(experts)) > len(experts) / 4


def test_truncated_ends_after_its_first_layers(quantised, oracle, tmp_path):
    short = truncated(quantised, tmp_path / "short", 2)
    assert_layout(short)
    whole, kept = read_tensors(quantised), read_tensors(short)
    assert all(torch.equal(whole[name].float(), kept[name].float()) for name in kept)
    assert not any(".layers.2." in name for name in kept)
    oracle.use(modelopt.dequantised_checkpoint(short, tmp_path / "plain"), "float32")
    assert np.isfinite(oracle.logits([3, 1, 2], [2])).all()


def test_shallow_keeps_the_width():
    published = json.loads((MODELS / "qwen3.6-35b-a3b-nvfp4" / "config.json").read_text())
    dims = ModelDims.from_config(shallow_config(published, ["linear_attention", "full_attention"]))
    assert dims.layer_types == ("linear_attention", "full_attention")
    assert (dims.hidden_size, dims.moe.num_experts) == (2048, 256)
    assert len(dims.quantised_layers) == 1 + 3 + 4 + 2 * 4


def test_float64_is_float64_throughout(oracle, tmp_path):
    folder = tiny_qwen36(SEED, tmp_path / "plain", wrapped=False)
    tokens = list(range(1, 60))
    oracle.use(folder, "float64")
    first = oracle.logits(tokens, [58])
    longer = oracle.logits([*tokens, *range(90)], [58])  # other shapes, other order of summation
    assert np.abs(first - longer).max() < 1e-11 * np.abs(first).max()


@pytest.mark.parametrize("name", sorted(seeded.SOURCES))
def test_named_sources_are_made_once(name, tmp_path, monkeypatch):
    monkeypatch.setenv("METAINFER_LAB_CACHE", str(tmp_path))
    folder = seeded.fetch(name)
    before = tree_hash(folder)
    assert_layout(folder)
    model = seeded.SOURCES[name][0]
    assert (folder / "config.json").read_text() == (MODELS / model / "config.json").read_text()
    assert seeded.fetch(name) == folder and tree_hash(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]

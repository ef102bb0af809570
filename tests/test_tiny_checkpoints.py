"""Tiny checkpoints: true layout, the same from the same seed, and bad ones refused by name."""

import importlib.util
import json
import sys

import numpy as np
import pytest
import torch

from metainfer_lab.checkpoints import variants
from metainfer_lab.checkpoints.tiny import draw_dims, tiny_checkpoint
from metainfer_lab.model import ModelDims
from metainfer_lab.paths import ENGINES

GRANULES = {"hidden_size": 16, "head_dim": 16, "vocab_size": 8}


def dims(family: str, tied: bool) -> dict:
    like = ModelDims.load("smollm2-135m" if family == "llama" else "qwen3-8b")
    return draw_dims(np.random.default_rng(), like, GRANULES, tie_word_embeddings=tied)


@pytest.fixture(scope="module")
def reference():
    """The plain engine, imported as a package of this process."""
    folder = ENGINES / "qwen3-reference"
    spec = importlib.util.spec_from_file_location(
        "reference_engine", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference_engine"] = module
    spec.loader.exec_module(module)
    yield module
    for name in [n for n in sys.modules if n.startswith("reference_engine")]:
        del sys.modules[name]


def load(reference, folder):
    return reference.load(str(folder), device="cpu", max_batch=2, max_context=32)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_finds_every_tensor(tmp_path, family, tied):
    from transformers import AutoModelForCausalLM

    drawn = dims(family, tied)
    for name, granule in GRANULES.items():
        assert drawn[name] % granule == 0
    folder = tiny_checkpoint(family, 3, tmp_path / "c", shards=2, **drawn)
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_a_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    drawn = dims("llama", True)
    blobs = [
        (
            tiny_checkpoint("llama", seed, tmp_path / str(i), **drawn) / "model.safetensors"
        ).read_bytes()
        for i, seed in enumerate((5, 5, 6))
    ]
    assert blobs[0] == blobs[1] != blobs[2]


def test_statistics_are_not_degenerate(tmp_path, reference):
    """Greedy choices differ by position and no token has nearly all the mass everywhere."""
    drawn = dims("qwen3", False)
    engine = load(reference, tiny_checkpoint("qwen3", 11, tmp_path / "c", **drawn))
    tokens = np.random.default_rng().integers(0, drawn["vocab_size"], 32).tolist()
    logits = torch.from_numpy(engine.score(tokens, list(range(32))))
    top = logits.softmax(-1).amax(-1)
    assert 0.02 < top.median() < 0.95
    assert len(set(logits.argmax(-1).tolist())) > 5


def test_bad_checkpoints_are_refused_by_name(tmp_path, reference):
    folder = tiny_checkpoint("llama", 1, tmp_path / "good", **dims("llama", False))
    name = "model.layers.1.mlp.up_proj.weight"
    bad = {
        name: [
            variants.without_tensor(folder, tmp_path / "a", name),
            variants.with_shape(folder, tmp_path / "b", name),
            variants.with_integers(folder, tmp_path / "c", name),
        ],
        "left.over": [variants.with_extra_tensor(folder, tmp_path / "d", "left.over")],
        "model.safetensors": [variants.truncated_file(folder, tmp_path / "e")],
    }
    shard, file = variants.without_shard(folder, tmp_path / "f")
    bad[file] = [shard]
    for expected, folders in bad.items():
        for case in folders:
            with pytest.raises(ValueError, match=expected.replace(".", r"\.")):
                load(reference, case)
    load(reference, folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "mamba"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4}),
        ("hidden_act", "gelu"),
        ("num_key_value_heads", 5),
        ("hidden_size", None),
        ("attention_bias", True),
    ],
)
def test_a_config_that_the_engine_does_not_compute_is_refused(tmp_path, reference, field, value):
    folder = tiny_checkpoint("llama", 1, tmp_path / "c", **dims("llama", True))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ValueError, match=field):
        load(reference, folder)


def test_perturbed_and_silenced_change_what_they_say(tmp_path):
    folder = tiny_checkpoint("llama", 1, tmp_path / "good", **dims("llama", True))
    before = variants.read_tensors(folder)
    name = "model.layers.0.input_layernorm.weight"
    after = variants.read_tensors(variants.perturbed(folder, tmp_path / "p", [name], 4))
    assert [n for n in before if not torch.equal(before[n], after[n])] == [name]
    quiet = variants.read_tensors(variants.silenced(folder, tmp_path / "s", ["0.mlp"]))
    assert quiet["model.layers.0.mlp.down_proj.weight"].any()
    assert not quiet["model.layers.0.self_attn.o_proj.weight"].any()
    assert not quiet["model.layers.1.mlp.down_proj.weight"].any()

"""The maker of full-size checkpoints, on published geometries made narrow. About 8 s."""

import json
import secrets

import numpy as np
import pytest
import torch

from metainfer_lab.checkpoints import fullsize, modelopt
from metainfer_lab.checkpoints.tiny_qwen36 import shallow_config
from metainfer_lab.engine import EngineProcess
from metainfer_lab.model import ModelDims, disk_tensors
from metainfer_lab.paths import ENGINES, MODELS

SEED = secrets.randbelow(2**32)
NARROW = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "intermediate_size": 192,
    "vocab_size": 500,
}
DTYPES = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}


def narrow(model):
    """The published config with its 256 experts and small widths; three layers of the hybrid."""
    config = json.loads((MODELS / model / "config.json").read_text())
    text = config.get("text_config", config)
    text |= {key: value for key, value in NARROW.items() if key in text}
    if "text_config" not in config:
        return config | {"num_hidden_layers": 4, "num_key_value_heads": 2}
    return shallow_config(config, ["linear_attention"] * 2 + ["full_attention"])


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3.6-35b-a3b", "qwen3.6-35b-a3b-nvfp4"])
def test_every_tensor_is_there_once(model):
    config = narrow(model)
    expected = disk_tensors(ModelDims.from_config(config))
    made = list(fullsize.tensors(config, SEED, text_only=True))
    text = {n for n in expected if not n.startswith(("mtp.", "model.visual."))}
    assert sorted(name for name, _ in made) == sorted(text)
    for name, tensor in made:
        stored = expected[name]
        assert tuple(tensor.shape) == stored.shape, name
        assert tensor.dtype == DTYPES.get(stored.dtype, torch.bfloat16), name
        assert bool(tensor.float().isfinite().all()), name


def test_layers_made_alone_are_the_same():
    config = narrow("qwen3.6-35b-a3b-nvfp4")
    whole = dict(fullsize.tensors(config, SEED))
    one = dict(fullsize.tensors(config, SEED, layers=[2]))
    assert all(torch.equal(whole[name].float(), tensor.float()) for name, tensor in one.items())
    assert {name.split(".")[3] for name in one if ".layers." in name} == {"2"}
    other = dict(fullsize.tensors(config, SEED + 1, layers=[2]))
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_quantised_weights_have_the_size_of_plain_ones():
    plain = dict(fullsize.tensors(narrow("qwen3.6-35b-a3b"), SEED))
    config = narrow("qwen3.6-35b-a3b-nvfp4")
    quantised = dict(fullsize.tensors(config, SEED))
    dims = ModelDims.from_config(config)
    for name, tensor in modelopt.dequantise(quantised, dims, torch.float32):
        if tensor.ndim > 1:
            assert 0.85 < tensor.float().std() / plain[name].float().std() < 1.15, name
    scales = [
        t.float() for name, t in quantised.items() if name.endswith("weight_scale") and t.ndim
    ]
    assert min(t.min() for t in scales) == 2.0**-9 and max(t.max() for t in scales) == 416


def test_written_in_shards_it_runs_and_touches_most_experts(tmp_path):
    config = narrow("qwen3.6-35b-a3b-nvfp4")
    folder = fullsize.write(config, SEED, tmp_path / "made", shard_bytes=1 << 20, text_only=True)
    assert len(list(folder.glob("*.safetensors"))) > 3
    streams = np.random.default_rng(SEED).integers(0, 500, (32, 6)).tolist()
    settings = {"device": "cpu", "max_batch": 2, "max_context": 64, "sandbox": "auto"}
    with EngineProcess(ENGINES / "qwen3.6-reference", folder, **settings) as engine:
        scored = [engine.score(stream, [5], routing=True) for stream in streams]
    logits = np.concatenate([row for row, _ in scored])
    assert np.isfinite(logits).all() and 2 < logits.std() < 5
    last = np.stack([experts[:, -1] for _, experts in scored], axis=1)  # [layers, streams, k]
    distinct = [len(np.unique(layer)) for layer in last]
    assert np.mean(distinct) > 145  # 163 if all were alike; one step of three layers is one draw

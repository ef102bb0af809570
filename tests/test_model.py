"""Counts, shapes and names from config.json alone, held against transformers' own models."""

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metainfer_lab.errors import InputError
from metainfer_lab.model import ModelDims, disk_tensors, inventory, storage
from metainfer_lab.model.layout import storage_on_disk, stored_bytes
from metainfer_lab.model.tensors import Tensor
from metainfer_lab.paths import MODELS

FEW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
ROPE = {"rope_type": "default", "rope_theta": 1e4}


def shapes_of_transformers(config: Any, kind: str) -> dict[str, tuple[int, ...]]:
    """Parameter shapes of transformers' own model on the meta device, tied ones once."""
    import torch
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, kind)(config)
    return {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}


def ours(config: dict[str, Any], leave_out: str = "mtp.") -> dict[str, tuple[int, ...]]:
    tensors = inventory(ModelDims.from_config(config))
    return {t.name: t.shape for t in tensors if not t.name.startswith(leave_out)}


@st.composite
def dense(draw: st.DrawFn) -> dict[str, Any]:
    groups, kv = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return {
        "hidden_size": 4 * groups * kv * draw(st.integers(1, 3)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": groups * kv,
        "num_key_value_heads": kv,
        "head_dim": 2 * draw(st.integers(1, 9)),
        "intermediate_size": draw(st.integers(1, 40)),
        "vocab_size": draw(st.integers(3, 90)),
        "tie_word_embeddings": draw(st.booleans()),
        "max_position_embeddings": 64,
        "rope_parameters": ROPE,
    }


@st.composite
def hybrid(draw: st.DrawFn) -> dict[str, Any]:
    config = draw(dense())
    del config["intermediate_size"]
    layers = draw(st.integers(1, 5))
    experts = draw(st.integers(2, 6))
    return config | {
        "num_hidden_layers": layers,
        "layer_types": [
            draw(st.sampled_from(["full_attention", "linear_attention"])) for _ in range(layers)
        ],
        "linear_num_key_heads": (key_heads := draw(st.integers(1, 3))),
        "linear_num_value_heads": key_heads * draw(st.integers(1, 2)),
        "linear_key_head_dim": draw(st.integers(1, 9)),
        "linear_value_head_dim": draw(st.integers(1, 9)),
        "linear_conv_kernel_dim": draw(st.integers(2, 4)),
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "moe_intermediate_size": draw(st.integers(1, 20)),
        "shared_expert_intermediate_size": draw(st.integers(1, 20)),
        "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
    }


@FEW
@given(dense(), st.sampled_from(["llama", "qwen3"]))
def test_dense_models_have_the_tensors_of_transformers(config, family):
    import transformers

    name = {"llama": "Llama", "qwen3": "Qwen3"}[family]
    theirs = getattr(transformers, f"{name}Config")(**config)
    assert ours(config | {"model_type": family}) == shapes_of_transformers(
        theirs, f"{name}ForCausalLM"
    )


@FEW
@given(hybrid())
def test_hybrid_text_models_have_the_tensors_of_transformers(config):
    from transformers import Qwen3_5MoeTextConfig

    theirs = shapes_of_transformers(Qwen3_5MoeTextConfig(**config), "Qwen3_5MoeForCausalLM")
    assert ours(config | {"model_type": "qwen3_5_moe_text"}) == theirs


@FEW
@given(hybrid(), st.integers(1, 2), st.integers(1, 3), st.integers(1, 3))
def test_multimodal_models_have_the_tensors_of_transformers(config, depth, width, merge):
    from transformers import Qwen3_5MoeConfig

    vision = {
        "depth": depth,
        "hidden_size": 8 * width,
        "num_heads": 2,
        "intermediate_size": 10 * width,
        "patch_size": 2 * merge,
        "spatial_merge_size": merge,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "out_hidden_size": config["hidden_size"],
        "num_position_embeddings": 16,
    }
    tied = config["tie_word_embeddings"]
    both = {"text_config": config, "vision_config": vision, "tie_word_embeddings": tied}
    theirs = shapes_of_transformers(
        Qwen3_5MoeConfig(**copy.deepcopy(both)), "Qwen3_5MoeForConditionalGeneration"
    )
    mine = both | {"model_type": "qwen3_5_moe"}
    mine["text_config"] = config | {"model_type": "qwen3_5_moe_text"}
    assert ours(mine) == theirs


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [
        ("smollm2-135m", 134_515_008, 272),
        ("qwen3-8b", 8_190_735_360, 399),
        ("qwen3.6-35b-a3b", 35_951_822_704, 1045),
        ("qwen3.6-35b-a3b-nvfp4", 35_951_822_704, 124_468),
    ],
)
def test_published_counts(name, parameters, tensors):
    dims = ModelDims.load(name)
    assert dims.parameter_count() == parameters
    assert len(dims.tensors()) == tensors


def test_parts_of_qwen36_have_their_published_sizes():
    sizes: dict[str, int] = {}
    for tensor in inventory(ModelDims.load("qwen3.6-35b-a3b")):
        sizes[tensor.role] = sizes.get(tensor.role, 0) + tensor.size
    assert sizes["embedding"] == sizes["head"] == 508_559_360
    assert sizes["routed_experts"] == 32_212_254_720
    assert (sizes["mtp"], sizes["vision"]) == (844_640_768, 446_571_248)


def test_nvidia_mix_on_disk_is_291_quantised_modules_and_23_4_gb():
    dims = ModelDims.load("qwen3.6-35b-a3b-nvfp4")
    assert len(dims.quantised_layers) == 291
    formats = storage("nvfp4-mix")
    total = sum(stored_bytes(t, formats[t.role]) for t in inventory(dims))
    assert total == pytest.approx(23.41e9, rel=1e-3)
    on_disk = storage_on_disk(dims)
    assert {role: formats[role] for role in on_disk} == on_disk
    width = {"U8": 1, "F8_E4M3": 1, "F32": 4, "FLOAT": 2}
    by_name = 0
    for stored in disk_tensors(dims).values():
        count = 1
        for size in stored.shape:
            count *= size
        by_name += count * width[stored.dtype]
    scalars = 4 * (2 * (161 - 40 + 3 * 256 * 40) + 2 * 130)
    assert by_name == total + scalars


def test_modelopt_names_split_experts_and_pack_two_codes_a_byte():
    tensors = ModelDims.load("qwen3.6-35b-a3b-nvfp4").tensors()
    base = "model.language_model.layers.7.mlp.experts.255"
    assert tensors[f"{base}.gate_proj.weight"] == (512, 1024)
    assert tensors[f"{base}.down_proj.weight_scale"] == (2048, 32)
    assert tensors[f"{base}.up_proj.weight_scale_2"] == ()
    assert tensors["lm_head.weight"] == (248320, 1024)
    assert tensors["model.language_model.layers.0.linear_attn.in_proj_qkv.weight"] == (8192, 2048)
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" not in tensors


def nvidia_config() -> dict[str, Any]:
    return json.loads((MODELS / "qwen3.6-35b-a3b-nvfp4" / "config.json").read_text())


def test_the_map_may_stand_in_the_file_beside_the_config(tmp_path):
    config = nvidia_config()
    layers = config["quantization_config"].pop("quantized_layers")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"hf_quant_config\.json: no such file"):
        ModelDims.from_config(tmp_path)
    side = tmp_path / "hf_quant_config.json"
    side.write_text(json.dumps({"quantization": {"quantized_layers": layers}}))
    expected = ModelDims.from_config(nvidia_config())
    assert ModelDims.from_config(tmp_path, name="model") == expected


def test_both_spellings_of_the_maps_names_and_single_experts_are_understood():
    config, algo = nvidia_config(), {"quant_algo": "W4A16_NVFP4"}
    layers = config["quantization_config"]["quantized_layers"]
    other = {
        name.replace("model.language_model.", "language_model.model."): item
        for name, item in layers.items()
        if not name.endswith("layers.5.mlp.experts")
    }
    for expert in range(256):
        other |= {
            f"language_model.model.layers.5.mlp.experts.{expert}.{projection}": algo
            for projection in ("gate_proj", "up_proj", "down_proj")
        }
    config["quantization_config"]["quantized_layers"] = other
    assert ModelDims.from_config(config) == ModelDims.from_config(nvidia_config())


def test_a_map_of_another_model_is_refused():
    config = nvidia_config()
    config["quantization_config"]["quantized_layers"]["model.layers.99.fc"] = {"quant_algo": "FP8"}
    with pytest.raises(InputError, match=r"1 modules are not in the model, model\.layers\.99\.fc"):
        ModelDims.from_config(config).tensors()


@given(st.integers(1, 64), st.integers(1, 8))
def test_bytes_of_a_format(rows, blocks):
    tensor = Tensor("w", (rows, 16 * blocks), "mlp")
    size = tensor.size
    assert stored_bytes(tensor, "fp32") == 2 * stored_bytes(tensor, "bf16") == 4 * size
    assert stored_bytes(tensor, "int8") == size + 4 * rows
    assert stored_bytes(tensor, "nvfp4") == 0.5625 * size
    assert stored_bytes(tensor, "nvfp4") < stored_bytes(tensor, "fp8") == size


def test_old_and_new_rope_fields_read_alike():
    config = json.loads((MODELS / "qwen3-8b" / "config.json").read_text())
    new = {key: value for key, value in config.items() if not key.startswith("rope")}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000000}
    assert ModelDims.from_config(new) == ModelDims.from_config(config)
    assert ModelDims.load("qwen3.6-35b-a3b").rotary_dim == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type: 'mamba' is not known; known are llama"),
        ({"hidden_size": None}, "hidden_size: None is not a positive integer"),
        ({"num_hidden_layers": "36"}, "num_hidden_layers: '36' is not a positive integer"),
        ({"attention_bias": True}, "attention_bias: True is not supported; only False"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported; only 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window: True is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type: 'yarn' is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types: 1 entries for 36 layers"),
        ({"layer_types": ["sliding_attention"] * 36}, "layer_types: ['sliding_attention']"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq' names no quantized_layers"),
        (
            {"quantization_config": {"quantized_layers": {"lm_head": {"quant_algo": "INT4"}}}},
            "quant_algo ['INT4'] is not known",
        ),
    ],
)
def test_a_config_that_changes_the_function_is_refused(change, message):
    config = json.loads((MODELS / "qwen3-8b" / "config.json").read_text())
    with pytest.raises(InputError) as refused:
        ModelDims.from_config(config | change)
    assert message in str(refused.value)


def test_unreadable_configs_are_named(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        ModelDims.from_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(InputError, match="not JSON"):
        ModelDims.from_config(tmp_path)
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(InputError, match="not a JSON object"):
        ModelDims.from_config(tmp_path)
    with pytest.raises(InputError, match="'zork' is no shipped geometry"):
        ModelDims.load("zork")

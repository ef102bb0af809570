"""A spec is read as written, or refused in one line that names the field."""

import pytest
import yaml

from metainfer_lab.errors import InputError
from metainfer_lab.paths import SPECS
from metainfer_lab.spec import Spec, shipped

LISTED = {
    "smollm2-135m-fp32-cpu",
    "smollm2-135m-int8-cpu",
    "qwen3-tiny-cpu",
    "qwen3.6-tiny-cpu",
    "qwen3-8b-bf16-h200",
    "qwen3-8b-bf16-tp2-h200",
    "qwen3-8b-bf16-tp4-h200",
    "qwen3-8b-bf16-tp4-a800",
    "qwen3.6-35b-a3b-nvfp4-h200",
    "qwen3.6-35b-a3b-nvfp4-b200",
}


def test_every_listed_spec_ships():
    assert set(shipped()) >= LISTED


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_spec_survives_the_way_through_yaml(name):
    spec = Spec.load(name)
    assert spec.id == name
    assert Spec.parse(yaml.safe_load(spec.to_yaml())) == spec
    assert Spec.load(SPECS / f"{name}.yaml") == spec


def test_change_replaces_a_leaf_and_leaves_the_original():
    spec = Spec.load("qwen3-8b-bf16-h200")
    changed = spec.change(parallel__tp=2, goals__tok_s=None)
    assert (changed.parallel.tp, changed.goals.tok_s) == (2, None)
    assert (spec.parallel.tp, spec.goals.tok_s) == (1, 250)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parallel__tp": 0}, "parallel.tp: input should be greater than or equal to 1, not 0"),
        ({"parallel__tpp": 2}, "parallel.tpp: unknown field; remove it or correct its spelling"),
        ({"precision__weights": "int3"}, "precision.weights: input should be 'fp32', 'bf16'"),
        ({"precision__modules": {"heads": "bf16"}}, "precision.modules.heads"),
        ({"capabilities__speculative": "yes"}, "capabilities.speculative: input should be 'none'"),
        (
            {"capabilities__paged_kv": "maybe"},
            "capabilities.paged_kv: input should be a valid bool",
        ),
        ({"workload__prompt_len": -3}, "workload.prompt_len: input should be greater than"),
        ({"goals__tok_s": "fast"}, "goals.tok_s: input should be a valid number"),
        ({"goals__ttft_ms": 0}, "goals.ttft_ms: input should be greater than 0, not 0"),
        ({"id": "Not An Id"}, "id: string should match pattern"),
    ],
)
def test_a_wrong_field_is_named_with_what_would_do(change, message):
    with pytest.raises(InputError) as refused:
        Spec.load("smollm2-135m-fp32-cpu").change(**change)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_every_wrong_field_is_reported_at_once():
    with pytest.raises(InputError, match=r"parallel\.tp: .*; workload\.concurrency: "):
        Spec.load("smollm2-135m-fp32-cpu").change(parallel__tp=0, workload__concurrency=0)


def test_a_missing_field_is_named():
    data = Spec.load("smollm2-135m-fp32-cpu").model_dump(mode="json")
    del data["hardware"]
    with pytest.raises(InputError, match="hardware: missing; add it"):
        Spec.parse(data)


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"spec\.yaml: .*mapping of fields"):
        Spec.load(path)


@pytest.mark.parametrize("blob", [b"id: [unclosed", b"\xff\xfe\x00broken"])
def test_a_file_that_is_no_yaml_is_refused(tmp_path, blob):
    path = tmp_path / "spec.yaml"
    path.write_bytes(blob)
    with pytest.raises(InputError, match=r"spec\.yaml: not YAML"):
        Spec.load(path)


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(InputError, match=r"spec zork: not shipped; known are .*smollm2-135m-fp32"):
        Spec.load("zork")
    with pytest.raises(InputError, match="no such file"):
        Spec.load(tmp_path / "absent.yaml")

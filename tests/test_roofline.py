"""Floors are monotone where they must be, add up, and equal a count made another way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer_lab.errors import InputError
from metainfer_lab.hardware import Hardware
from metainfer_lab.model import ModelDims, inventory, storage
from metainfer_lab.roofline import (
    Deployment,
    decode_terms,
    floor_seconds,
    link_terms,
    moved_bytes,
    prefill_terms,
    resident_bytes,
    resource_seconds,
    sequences_that_fit,
    weight_bytes_per_token,
)

MODELS = {
    "smollm2-135m": "bf16",
    "qwen3-8b": "bf16",
    "qwen3.6-35b-a3b-nvfp4": "nvfp4-mix",
}
H200 = Hardware.load("h200")
QUICK = settings(max_examples=25, deadline=None)
models = st.sampled_from(sorted(MODELS))
batches, contexts = st.integers(1, 256), st.integers(0, 40_000)


def deployment(model: str, tp: int = 1, **changes: str) -> Deployment:
    scheme = changes.pop("weights", MODELS[model])
    settings = {"activations": "bf16", "kv_cache": "bf16", "state": "fp32"} | changes
    return Deployment(ModelDims.load(model), storage(scheme), tp=tp, **settings)


def step(model: str, batch: int, context: int, tp: int = 1, **changes: str) -> float:
    return floor_seconds(decode_terms(deployment(model, tp, **changes), H200, batch, context))


@QUICK
@given(models, batches, contexts, st.integers(1, 64), st.integers(1, 5000))
def test_more_work_is_never_faster(model, batch, context, more, longer):
    base = step(model, batch, context)
    assert step(model, batch + more, context) >= base
    assert step(model, batch, context + longer) >= base


@QUICK
@given(models, batches, contexts, st.integers(1, 64))
def test_a_larger_batch_never_lowers_throughput_at_the_same_context(model, batch, context, more):
    few, many = (n / step(model, n, context) for n in (batch, batch + more))
    assert many >= few * (1 - 1e-12)


@QUICK
@given(models, batches, contexts)
def test_nominal_rates_are_never_slower_than_planning_ones(model, batch, context):
    terms = decode_terms(deployment(model), H200, batch, context, kind="nominal")
    assert floor_seconds(terms) <= step(model, batch, context)


@QUICK
@given(models, batches, contexts)
def test_fewer_bits_move_fewer_bytes(model, batch, context):
    moved = [
        moved_bytes(decode_terms(deployment(model, weights=w), H200, batch, context))
        for w in ("fp32", "bf16", "fp8", "nvfp4")
    ]
    assert moved == sorted(moved, reverse=True) and len(set(moved)) == len(moved)


@QUICK
@given(st.sampled_from(["qwen3-8b"]), batches, contexts, st.sampled_from([1, 2, 4, 8]))
def test_devices_share_bytes_and_operations_but_not_norms(model, batch, context, tp):
    one, many = (decode_terms(deployment(model, n), H200, batch, context) for n in (1, tp))
    assert moved_bytes(one) <= tp * moved_bytes(many) <= moved_bytes(one) * 1.001
    assert resource_seconds(many)["arithmetic"] * tp == pytest.approx(
        resource_seconds(one)["arithmetic"]
    )


@QUICK
@given(models, st.integers(1, 8192))
def test_a_first_token_floor_is_the_larger_of_bytes_and_operations(model, tokens):
    seconds = resource_seconds(prefill_terms(deployment(model), H200, tokens))
    floor = floor_seconds(prefill_terms(deployment(model), H200, tokens))
    assert floor == max(seconds["memory"], seconds["arithmetic"]) < sum(seconds.values())


@given(st.integers(1, 1000))
def test_expected_experts_rise_from_top_k_towards_all(tokens):
    spread = deployment("qwen3.6-35b-a3b-nvfp4")
    assert spread.touched(1) == pytest.approx(8)
    assert 8 <= spread.touched(tokens) <= spread.touched(tokens + 1) <= 256
    assert deployment("qwen3-8b").touched(tokens) == 0


def test_measured_experts_replace_the_expectation():
    spread = deployment("qwen3.6-35b-a3b-nvfp4")
    few, all_of_them = (
        moved_bytes(decode_terms(spread, H200, 32, 0, experts_touched=n)) for n in (100, 256)
    )
    expert_bytes = 32_212_254_720 * 0.5625
    assert all_of_them - few == pytest.approx(expert_bytes * 156 / 256)
    assert spread.touched(32) == pytest.approx(163.3, abs=0.05)


def test_bytes_per_token_are_all_but_the_embedding():
    total = sum(tensor.size for tensor in inventory(ModelDims.load("qwen3-8b")))
    assert weight_bytes_per_token(deployment("qwen3-8b")) == 2 * (total - 151936 * 4096)
    tied = deployment("smollm2-135m", weights="fp32")
    assert weight_bytes_per_token(tied) == 4 * 134_515_008


def test_state_and_cache_bytes_of_qwen36_and_qwen3():
    hybrid, dense = deployment("qwen3.6-35b-a3b-nvfp4"), deployment("qwen3-8b")
    assert hybrid.state_bytes() == 30 * 32 * 128 * 128 * 4
    assert hybrid.conv_bytes() == 30 * 8192 * 3 * 2
    assert (hybrid.kv_bytes_per_token(), dense.kv_bytes_per_token()) == (20_480, 147_456)
    assert dense.state_bytes() == 0


def test_kv_heads_are_copied_beyond_their_number():
    dense = deployment("qwen3-8b")
    assert dense.kv_bytes_per_token(16) == dense.kv_bytes_per_token(8) == 147_456 // 8


def test_published_floors_of_precision_variants():
    """GB per token with state, from the table of models by bytes: FP8, all NVFP4."""
    for scheme, gigabytes in (("bf16", 6.019), ("fp8", 3.607), ("nvfp4", 1.821)):
        terms = decode_terms(deployment("qwen3.6-35b-a3b-nvfp4", weights=scheme), H200, 1, 0)
        assert moved_bytes(terms) / 1e9 == pytest.approx(gigabytes, abs=1e-3)


@pytest.mark.parametrize(
    ("batch", "gigabytes", "tok_s"),
    [(1, 2.40, 1791), (4, 4.44, 3877), (8, 6.93, 4966), (16, 11.25, 6113), (32, 17.95, 7668)],
)
def test_published_floors_by_batch(batch, gigabytes, tok_s):
    terms = decode_terms(deployment("qwen3.6-35b-a3b-nvfp4"), H200, batch, 1024)
    assert moved_bytes(terms) / 1e9 == pytest.approx(gigabytes, abs=0.006)
    assert batch / floor_seconds(terms) == pytest.approx(tok_s, rel=2e-3)


def test_memory_holds_what_fits_and_no_sequence_more():
    spread = deployment("qwen3-8b")
    count = sequences_that_fit(spread, H200, 8192)
    used = resident_bytes(spread) + count * spread.sequence_bytes(8192)
    assert used <= H200.memory_bytes < used + spread.sequence_bytes(8192)


def test_all_reduces_are_two_a_layer_and_need_a_link():
    (term,) = link_terms(deployment("qwen3-8b", 2), H200, 1)
    assert term.amount == 72 * 4096 * 2 * 2 * 1 / 2
    assert link_terms(deployment("qwen3-8b"), H200, 1) == []
    alone = H200.model_copy(update={"link": None})
    with pytest.raises(InputError, match=r"parallel\.tp: h200 has no link"):
        link_terms(deployment("qwen3-8b", 2), alone, 1)


def test_every_term_says_how_it_came_about():
    for term in decode_terms(deployment("qwen3.6-35b-a3b-nvfp4", 2), H200, 8, 1024):
        assert term.formula and term.source and term.seconds > 0 and term.amount > 0


def test_quantised_activations_compute_in_their_type():
    names = {
        term.name
        for term in decode_terms(
            deployment("qwen3.6-35b-a3b-nvfp4", activations="fp8_static"), H200, 1, 0
        )
    }
    assert {"fp8 matrix products", "bf16 matrix products"} <= names

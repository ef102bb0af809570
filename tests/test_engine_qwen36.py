"""The Qwen3.6 NVFP4 engine on the CPU: naive operators against transformers in float32.

A tiny random checkpoint is quantised in ModelOpt's layout; the oracle gets the same values, exactly
dequantised, so 1e-5 is the tolerance of arithmetic order alone. The kernels are compiled for both
targets without a GPU. About 40 s.
"""

import importlib.util
import itertools
import json
import sys

import numpy as np
import pytest
import torch
from qwen36_maker import TINY, TOLERANCE, load_package, make_checkpoint
from safetensors.torch import save_file


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    seed = int(np.random.default_rng().integers(2**31))
    print("seed", seed)
    return folder, make_checkpoint(folder, seed)


@pytest.fixture(scope="module")
def oracle(checkpoint):
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    config = Qwen3_5MoeTextConfig(**{k: v for k, v in TINY.items() if k != "model_type"})
    model = Qwen3_5MoeForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(checkpoint[1].exact, strict=False)
    assert not missing and not unexpected

    @torch.inference_mode()
    def logits(tokens):
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()

    return logits


@pytest.fixture
def engine(checkpoint):
    engine = load_package().load(checkpoint[0], device="cpu", max_batch=3, max_context=96)
    yield engine
    engine.close()


def random_tokens(count):
    return np.random.default_rng().integers(0, 300, count).tolist()


def error(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def drain(engine, events=None):
    """Step until nothing is left; {id: [(token, logprob, top, reason)]}."""
    out = {}
    for _ in range(400):
        for request, *rest in engine.step():
            out.setdefault(request, []).append(tuple(rest))
        stats = engine.stats()
        if not stats["running"] and not stats["waiting"]:
            return out
    raise AssertionError("the engine never finished")


def check_against_oracle(oracle, prompt, events):
    """Each greedy token and logprob is the oracle's, given the engine's own text before it."""
    tokens = [event[0] for event in events]
    logits = torch.from_numpy(oracle(prompt + tokens))[len(prompt) - 1 : -1].double()
    logprobs = logits.log_softmax(-1)
    for row, (token, logprob, *_) in enumerate(events):
        assert logits[row].max() - logits[row, token] < 1e-4
        assert abs(logprobs[row, token] - logprob) < 1e-4


def test_score_equals_transformers(engine, oracle):
    tokens = random_tokens(70)
    got, want = engine.score(tokens, range(70)), oracle(tokens)
    errors = [error(got[i], want[i]) for i in range(70)]
    assert np.median(errors) < TOLERANCE and max(errors) < 30 * TOLERANCE


def test_prefill_may_be_split_anywhere(engine, oracle):
    tokens = random_tokens(41)
    want = oracle(tokens)
    cuts = sorted(np.random.default_rng().choice(np.arange(1, 41), 6, replace=False).tolist())
    bounds = [0, *cuts, 41]
    with torch.inference_mode():
        slot = engine.cache.allocate(len(tokens))
        errors = []
        for start, end in itertools.pairwise(bounds):
            logits = engine.runner.prefill(slot, start, tokens[start:end], True)
            errors.append(error(logits[0].numpy(), want[end - 1]))
    # Single positions of float32 reach 8e-5 (seen in 84 texts of 41): the median is what is tight.
    assert np.median(errors) < TOLERANCE and max(errors) < 30 * TOLERANCE


def test_routing_is_reported(engine):
    _, ids = engine.score(random_tokens(9), [8], routing=True)
    assert ids.shape == (4, 9, 4) and len(np.unique(ids)) > 4


def test_greedy_decode_of_several_requests(engine, oracle):
    """More requests than slots, of unequal lengths, one joining late and one cancelled."""
    prompts = [random_tokens(n) for n in (5, 17, 1, 30)]
    ids = [engine.submit(p, {"max_new_tokens": 7, "ignore_eos": True}) for p in prompts[:3]]
    for _ in range(5):
        engine.step()
    engine.cancel(ids[0])
    ids.append(engine.submit(prompts[3], {"max_new_tokens": 6, "ignore_eos": True}))
    events = drain(engine)
    assert ids[0] not in events
    assert engine.stats()["cache_bytes_used"] == 0
    check_against_oracle(oracle, prompts[3], events[ids[3]])
    assert events[ids[3]][-1][3] == "length"


def test_slots_are_reused_cleanly(engine, oracle):
    prompt = random_tokens(12)
    for _ in range(5):
        engine.submit(random_tokens(33), {"max_new_tokens": 3, "ignore_eos": True})
    last = engine.submit(prompt, {"max_new_tokens": 8, "ignore_eos": True})
    check_against_oracle(oracle, prompt, drain(engine)[last])


def test_where_states_are_most_of_a_cache_fewer_run_at_once(checkpoint, oracle):
    """A limit is a limit: all requests end, few at a time; beside states the rest is pages."""
    package, folder = load_package(), checkpoint[0]
    asked = {"device": "cpu", "max_context": 96}
    one = package.load(folder, max_batch=1, **asked)
    cache = one.cache
    limit = 4 * (cache.states.nbytes + cache.rings.nbytes) + 3 * cache.pages.nbytes
    one.close()
    engine = package.load(folder, max_batch=32, cache_bytes=limit, **asked)
    prompt, params = random_tokens(12), {"max_new_tokens": 8, "ignore_eos": True}
    ids = [engine.submit(prompt, params) for _ in range(6)]
    events, stats = drain(engine), engine.stats()
    assert stats["cache_bytes_total"] <= limit and 1 <= stats["largest_batch"] < 6
    for request in ids:
        check_against_oracle(oracle, prompt, events[request])
    with pytest.raises(ValueError, match="cache_bytes"):
        package.load(folder, max_batch=32, cache_bytes=cache.states.nbytes // 2, **asked)
    engine.close()


def test_same_calls_give_the_same_bits(engine):
    prompt, params = random_tokens(10), {"max_new_tokens": 6, "temperature": 1.0, "seed": 5}
    first = engine.submit(prompt, params)
    a = drain(engine)[first]
    second = engine.submit(prompt, params)
    assert drain(engine)[second] == a


def test_stop_tokens_and_logprobs(engine):
    prompt = random_tokens(6)
    probe = engine.submit(prompt, {"max_new_tokens": 4, "ignore_eos": True, "logprobs": 3})
    events = drain(engine)[probe]
    assert events[0][2][0] == (events[0][0], pytest.approx(events[0][1], abs=1e-5))
    assert len(events[0][2]) == 3
    stop = engine.submit(prompt, {"max_new_tokens": 9, "stop_token_ids": [events[2][0]]})
    tokens = [e[0] for e in drain(engine)[stop]]
    assert tokens[-1] == events[2][0] and len(tokens) <= 3


def test_filters_keep_to_the_allowed_tokens(engine):
    """top_k 1 is greedy whatever the temperature; a bias of -inf size removes a token."""
    prompt = random_tokens(8)
    base = {"max_new_tokens": 5, "ignore_eos": True}
    greedy = engine.submit(prompt, base)
    narrow = engine.submit(prompt, {**base, "temperature": 3.0, "top_k": 1, "seed": 1})
    events = drain(engine)
    assert [e[0] for e in events[greedy]] == [e[0] for e in events[narrow]]
    first = events[greedy][0][0]
    banned = engine.submit(prompt, {**base, "logit_bias": {first: -1e9}})
    assert drain(engine)[banned][0][0] != first


def test_no_hash_makes_noise_that_is_infinite():
    """Infinite noise would pick a token whatever its probability."""
    uniform = sys.modules[load_package().__name__ + ".sampler"].uniform
    least, most = uniform(torch.tensor([0, 2**32 - 1]))
    assert 0 < least < most < 1


def test_sampling_follows_the_distribution():
    """Gumbel picks of 40,000 seeds match a softmax over eight tokens (chi-square, alpha 1e-6)."""
    sampler = sys.modules[load_package().__name__ + ".sampler"]
    logits = torch.randn(1, 8).expand(40000, 8)
    seeds = torch.randint(2**40, (40000,))
    picks = sampler.pick(logits, torch.full((40000,), 0.7), seeds, torch.arange(40000) % 97)
    expected = (logits[0] / 0.7).softmax(-1) * 40000
    chi = ((torch.bincount(picks, minlength=8) - expected) ** 2 / expected).sum()
    assert chi < 43.0


@pytest.mark.parametrize("kind", ["nvfp4", "fp8", "f16"])
def test_packing_is_reversible(kind):
    formats = sys.modules[load_package().__name__ + ".formats"]
    rows, cols = 48, 256
    if kind == "nvfp4":
        values = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8)
        scales = torch.rand(rows, cols // 16).to(torch.float8_e4m3fn)
    else:
        dtype = torch.float8_e4m3fn if kind == "fp8" else torch.float16
        values, scales = torch.randn(rows, cols).to(dtype), None
    packed = formats.pack(kind, values, scales)
    back, back_scales = formats.unpack(kind, *packed, rows, cols)
    assert torch.equal(back.view(torch.uint8), values.view(torch.uint8))
    if scales is not None:
        assert torch.equal(back_scales.view(torch.uint8), scales.view(torch.uint8))


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda e: e.submit([], {}), "tokens"),
        (lambda e: e.submit([304], {}), "tokens"),
        (lambda e: e.submit([1] * 97, {}), "max_context"),
        (lambda e: e.submit([1], {"max_new_tokens": 0}), "max_new_tokens"),
        (lambda e: e.cancel(3), "request_id"),
        (lambda e: e.submit([1, 0.5]), "tokens"),
        (lambda e: e.submit([1], {"best_of": 2}), "best_of"),
        (lambda e: e.submit([1], {"top_p": 0.0}), "top_p"),
        (lambda e: e.submit([1], {"logprobs": 21}), "logprobs"),
        (lambda e: e.score([1, 2], [2]), "positions"),
    ],
)
def test_bad_calls_are_named(engine, call, names):
    with pytest.raises(ValueError, match=names):
        call(engine)


def test_the_context_edge_is_served(engine, oracle):
    prompt = random_tokens(90)
    request = engine.submit(prompt, {"max_new_tokens": 6, "ignore_eos": True})
    check_against_oracle(oracle, prompt, drain(engine)[request])


def test_bad_checkpoints_are_refused_by_name(checkpoint, tmp_path):
    _, maker = checkpoint
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    victim = "model.language_model.layers.2.mlp.experts.3.up_proj.weight_scale"
    unused = victim.replace("weight_scale", "input_scale")  # and yet part of the layout
    broken = {
        "missing": {k: v for k, v in maker.stored.items() if k != victim},
        "left over": {**maker.stored, "model.language_model.extra": torch.zeros(1)},
        "shape": {**maker.stored, victim: maker.stored[victim][:-1]},
        "dtype": {**maker.stored, victim: maker.stored[victim].float()},
        "not a scalar float": {**maker.stored, unused: torch.ones(2)},
        "I32": {**maker.stored, unused: torch.ones(1, dtype=torch.int32)},
    }
    for fault, tensors in broken.items():
        path = tmp_path / "model.safetensors"
        save_file({k: v.contiguous() for k, v in tensors.items()}, path)
        with pytest.raises(ValueError, match=fault) as caught:
            load_package().load(tmp_path, device="cpu", max_batch=1, max_context=8)
        assert any(name in str(caught.value) for name in ("extra", victim, unused))


OPERATOR_SIZES = TINY | {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "vocab_size": 320,
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
}


def test_naive_operators_serve_any_float_dtype(tmp_path):
    """The specification of every kernel, in float64 and float32, on the packed weights."""
    package = load_package()
    part = lambda name: importlib.import_module(f"{package.__name__}.{name}")  # noqa: E731
    make_checkpoint(tmp_path, 7, OPERATOR_SIZES)
    config = part("config").read_config(tmp_path)
    source = part("checkpoint").Checkpoint(tmp_path, torch.device("cpu"))
    with torch.inference_mode():
        weights = part("weights").Loader(source, config, packed=True).load()
        for name, operator in part("operators").OPERATORS.items():
            rows = 1 if name.startswith("single") or name == "delta_single" else 3
            bench = operator.inputs(config, weights, rows, 128, seed=11)
            exact = operator.naive(bench, torch.float64)
            close = operator.naive(bench, torch.float32)
            for key, value in exact.items():
                assert value.isfinite().all() and value.double().norm() > 0, (name, key)
                assert error(close[key].double().numpy(), value.numpy()) < 1e-4, (name, key)

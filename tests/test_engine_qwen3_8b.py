"""The Qwen3-8B engine on a CPU: its naive operators, cache, scheduler, loader and sampler at 1e-5.

The whole file takes about half a minute; kernels are compiled for their targets, not run.
"""

import importlib.util
import itertools
import json
import random
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from metainfer_lab.paths import ENGINES

VOCAB = 320


def _package():
    folder = ENGINES / "qwen3-8b-bf16-h200"
    spec = importlib.util.spec_from_file_location(
        "engine_qwen3_8b", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["engine_qwen3_8b"] = package
    spec.loader.exec_module(package)
    return package


engine_package = _package()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random Qwen3 of transformers, and its folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(random.randrange(2**31))
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        eos_token_id=VOCAB - 1,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    model = Qwen3ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    folder = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(folder)
    return model, folder


def _load(folder, **arguments):
    settings = {"device": "cpu", "max_batch": 4, "max_context": 512} | arguments
    return engine_package.load(folder, **settings)


def _prompt(length):
    return [random.randrange(VOCAB - 1) for _ in range(length)]


def _reference(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].double()


def _finish(engine, limit=3000):
    """Steps until nothing is left; (tokens, logprobs, top, reason) by request."""
    out = {}
    for _ in range(limit):
        for request, token, logprob, top, reason in engine.step():
            out.setdefault(request, []).append((token, logprob, top, reason))
        stats = engine.stats()
        if not stats["running"] and not stats["waiting"]:
            return out
    raise AssertionError("the engine does not come to an end")


def _run(engine, prompts, **params):
    ids = [engine.submit(p, {"ignore_eos": True, "max_new_tokens": 12} | params) for p in prompts]
    out = _finish(engine)
    return [out[i] for i in ids]


def _assert_greedy(model, prompt, steps):
    """Each token is the reference's choice on the engine's own text, with its log-probability."""
    tokens = [step[0] for step in steps]
    logits = _reference(model, prompt + tokens)[len(prompt) - 1 : -1]
    logprobs = logits.log_softmax(-1)
    for row, (token, logprob, _, _) in enumerate(steps):
        assert logprobs[row].max() - logprobs[row, token] < 1e-4
        assert abs(logprobs[row, token] - logprob) < 1e-4
    assert [step[3] is None for step in steps[:-1]] == [True] * (len(steps) - 1)


def test_score_equals_transformers_at_every_position(model):
    reference, folder = model
    tokens = _prompt(200)
    positions = [*random.sample(range(200), 60), 199, 0, 0]
    got = _load(folder).score(tokens, positions)
    want = _reference(reference, tokens)[positions]
    assert got.dtype == np.float32
    assert np.linalg.norm(got - want.numpy()) < 1e-5 * np.linalg.norm(want.numpy())


def test_a_long_prompt_in_chunks_alone_and_beside_others(model):
    reference, folder = model
    engine = _load(folder, max_context=1600)
    long = _prompt(1100)
    want = _reference(reference, long)[[5, 1023, 1024, 1099]].numpy()
    assert np.linalg.norm(engine.score(long, [5, 1023, 1024, 1099]) - want) < 1e-5 * np.linalg.norm(
        want
    )
    short = _prompt(9)
    first = engine.submit(short, {"max_new_tokens": 40, "ignore_eos": True})
    engine.step()
    second = engine.submit(long, {"max_new_tokens": 4, "ignore_eos": True})
    out = _finish(engine)
    assert len(out[first]) == 40 and len(out[second]) == 4
    _assert_greedy(reference, short, out[first])
    _assert_greedy(reference, long, out[second])


def test_prompts_go_first_until_those_who_decode_have_their_turn(model, monkeypatch):
    engine = _load(model[1])
    monkeypatch.setattr(engine_package.engine, "PAUSE", 200)
    launched = []
    for name in ("prefill", "decode"):
        call = getattr(engine.runner, name)
        monkeypatch.setattr(
            engine.runner, name, lambda *a, n=name, c=call: (launched.append(n), c(*a))[1]
        )
    settings = {"max_new_tokens": 12, "ignore_eos": True}
    old = engine.submit(_prompt(5), settings)
    engine.step(), engine.step()
    launched.clear()
    a, b, c = (engine.submit(_prompt(100), settings) for _ in range(3))
    arrived = [sorted(result[0] for result in engine.step()) for _ in range(5)]
    assert launched == ["prefill", "prefill", "decode", "prefill", "decode"]
    assert arrived == [[old], [a], [b], [old, a, b], [c]]  # each result one launch later


def test_decode_across_pages_slots_and_arrivals(model):
    reference, folder = model
    engine = _load(folder)
    prompts = [_prompt(n) for n in (1, 62, 63, 64, 65, 127, 130, 5, 40)]
    ids, out = [], {}
    for prompt in prompts:  # more than slots, arriving while others run
        ids.append(
            engine.submit(prompt, {"max_new_tokens": random.randrange(1, 70), "ignore_eos": True})
        )
        for _ in range(random.randrange(6)):
            for request, *step in engine.step():
                out.setdefault(request, []).append(step)
    for request, steps in _finish(engine).items():
        out.setdefault(request, []).extend(steps)
    for prompt, request in zip(prompts, ids, strict=True):
        _assert_greedy(reference, prompt, out[request])
        assert out[request][-1][3] == "length"
    stats = engine.stats()
    assert stats["largest_batch"] == 4 and stats["cache_bytes_used"] == 0


def test_the_same_calls_give_the_same_bits(model):
    _, folder = model
    prompts = [_prompt(n) for n in (70, 3, 20)]
    runs = [_run(_load(folder), prompts, temperature=0.7, seed=5) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_prefix_hit_equals_a_miss(model):
    reference, folder = model
    engine = _load(folder)
    prompt = _prompt(200)
    miss = _run(engine, [prompt])[0]
    assert engine.stats()["prefix_hit_tokens"] == 0
    hit = _run(engine, [prompt])[0]
    assert engine.stats()["prefix_hit_tokens"] == 192
    assert [step[0] for step in hit] == [step[0] for step in miss]
    assert max(abs(a[1] - b[1]) for a, b in zip(hit, miss, strict=True)) < 1e-5
    turn = prompt + [step[0] for step in miss[:-1]] + _prompt(50)  # part of the prompt only
    _assert_greedy(reference, turn, _run(engine, [turn])[0])
    other = [*prompt[:64], (prompt[64] + 1) % VOCAB, *prompt[65:]]
    before = engine.stats()["prefix_hit_tokens"]
    _assert_greedy(reference, other, _run(engine, [other])[0])
    assert engine.stats()["prefix_hit_tokens"] - before == 64


def test_pages_are_shared_evicted_and_reused_under_pressure(model):
    reference, folder = model
    page = _load(folder, max_batch=1, max_context=64).stats()["cache_bytes_total"] // 2
    engine = _load(folder, max_context=320, cache_bytes=9 * page)
    prompts = [_prompt(n) for n in (100, 190, 64, 150)]
    prompts += [prompts[0], prompts[1]]
    for prompt, steps in zip(prompts, _run(engine, prompts, max_new_tokens=90), strict=True):
        assert len(steps) == 90
        _assert_greedy(reference, prompt, steps)
    stats = engine.stats()
    assert stats["preemptions"] > 0 and stats["cache_bytes_used"] == 0
    assert stats["cache_bytes_total"] <= 9 * page
    running = engine.submit(prompts[0], {"max_new_tokens": 150, "ignore_eos": True})
    engine.step()
    tokens = _prompt(320)
    want = _reference(reference, tokens)[-1].numpy()
    assert np.linalg.norm(engine.score(tokens, [319])[0] - want) < 1e-5 * np.linalg.norm(want)
    _assert_greedy(reference, prompts[0], _finish(engine)[running])


def test_cancel_leaves_neighbours_alone(model):
    reference, folder = model
    engine = _load(folder, max_batch=2)
    prompts = [_prompt(n) for n in (30, 70, 20, 66)]
    ids = [engine.submit(p, {"max_new_tokens": 30, "ignore_eos": True}) for p in prompts]
    seen = list(itertools.chain(*(engine.step() for _ in range(5))))
    engine.cancel(ids[0])
    engine.cancel(ids[2])  # still waiting
    assert engine.stats()["running"] + engine.stats()["waiting"] == 2
    out = _finish(engine)
    assert set(out) == {ids[1], ids[3]}
    early = [step[1:] for step in seen if step[0] == ids[1]]
    _assert_greedy(reference, prompts[1], early + out[ids[1]])
    _assert_greedy(reference, prompts[3], out[ids[3]])
    for gone in (ids[0], ids[1], 99):
        with pytest.raises(ValueError, match="request_id"):
            engine.cancel(gone)


def test_stop_tokens_end_and_are_returned(model):
    _, folder = model
    engine = _load(folder)
    prompt = _prompt(20)
    free = [step[0] for step in _run(engine, [prompt])[0]]
    stop = free[4]
    steps = _run(engine, [prompt], stop_token_ids=[stop])[0]
    assert [s[0] for s in steps] == free[: free.index(stop) + 1] and steps[-1][3] == "stop"
    steps = _run(engine, [prompt], stop_token_ids=[stop], min_tokens=6)[0]
    assert stop not in [s[0] for s in steps[:6]] and len(steps) > 6


def test_context_edge_and_refusals(model):
    _, folder = model
    engine = _load(folder, max_context=64)
    assert [s[3] for s in _run(engine, [_prompt(63)])[0]] == ["length"]
    assert engine.score(_prompt(64), [63]).shape == (1, VOCAB)
    for tokens in ([], [VOCAB], [-1], [1.5], [True], _prompt(64)):
        with pytest.raises(ValueError, match="tokens"):
            engine.submit(tokens, {})
    for name, value in {
        "temperature": -1.0,
        "top_p": 0.0,
        "top_k": -1,
        "min_p": float("nan"),
        "seed": True,
        "logprobs": 21,
        "max_new_tokens": 0,
        "min_tokens": 99,
        "repetition_penalty": 0.0,
        "logit_bias": {VOCAB: 1.0},
        "stop_token_ids": [VOCAB],
        "best_of": 2,
    }.items():
        with pytest.raises(ValueError, match=name):
            engine.submit([1], {name: value})
    with pytest.raises(ValueError, match="positions"):
        engine.score([1, 2], [2])
    with pytest.raises(ValueError, match="routing"):
        engine.score([1, 2], [1], routing=True)
    for name, value in {
        "max_batch": 0,
        "max_context": 5000,
        "cache_bytes": 1000,
        "world": 2,
    }.items():
        with pytest.raises(ValueError, match=name):
            _load(folder, **{name: value})
    assert len(_run(engine, [[1, 2]])[0]) == 12  # as if nothing had been refused


def test_draws_follow_temperature_and_top_p():
    """20,000 draws through the sampler itself; chi-square at one in a million."""
    sampler = sys.modules["engine_qwen3_8b.sampler"]
    rows, vocab = 4000, 30
    logits = torch.randn(1, vocab) * 2
    probabilities = (logits[0].double() / 0.8).softmax(-1)
    order = probabilities.argsort(descending=True)
    kept = order[: int((probabilities[order].cumsum(-1) < 0.9).sum()) + 1]
    wanted = torch.zeros(vocab, dtype=torch.float64)
    wanted[kept] = probabilities[kept] / probabilities[kept].sum()
    params = engine_package.engine.SamplingParams(temperature=0.8, top_p=0.9)
    requests = [_Row(params, random.Random(random.random())) for _ in range(rows)]
    draws = torch.cat([sampler._draw(logits.expand(rows, -1), requests) for _ in range(5)])
    counts = torch.bincount(draws, minlength=vocab).double()
    assert counts[wanted == 0].sum() == 0
    expected = wanted[kept] * 5 * rows
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(kept) - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(freedom, statistic / 2) > 1e-6


class _Row:
    def __init__(self, params, generator):
        self.params, self.generator = params, generator


def test_penalties_bias_and_top_logprobs(model):
    reference, folder = model
    engine = _load(folder)
    prompt = _prompt(25)
    steps = _run(engine, [prompt], logprobs=5)[0]
    logprobs = _reference(reference, prompt)[-1].log_softmax(-1)
    top = logprobs.topk(5)
    assert [pair[0] for pair in steps[0][2]] == top.indices.tolist()
    assert np.allclose([pair[1] for pair in steps[0][2]], top.values, atol=1e-4)
    banned = [step[0] for step in steps]
    biased = _run(engine, [prompt], logit_bias={token: -100.0 for token in banned})[0]
    assert not set(banned) & {step[0] for step in biased}
    distinct = _run(engine, [prompt], presence_penalty=2.0, repetition_penalty=1e6)[0]
    assert len({step[0] for step in distinct}) == 12
    assert [step[0] for step in _run(engine, [prompt])[0]] == banned  # no trace in the slot


def test_bad_checkpoints_are_refused_by_name(model, tmp_path):
    _, folder = model
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    changes = {
        "missing": {k: v for k, v in tensors.items() if k != name},
        "left over": tensors | {"model.layers.9.mlp.up_proj.weight": torch.zeros(2)},
        "shape": tensors | {name: tensors[name][:-1].contiguous()},
        "float64|torch.float": tensors | {name: tensors[name].double()},
    }
    for problem, changed in changes.items():
        target = tmp_path / problem.replace(" ", "-").split("|")[0]
        target.mkdir()
        (target / "config.json").write_text((folder / "config.json").read_text())
        save_file(changed, target / "model.safetensors")
        with pytest.raises(ValueError, match=problem) as error:
            _load(target)
        assert "up_proj" in str(error.value)
    (tmp_path / "missing" / "model.safetensors").write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        _load(tmp_path / "missing")
    config = json.loads((folder / "config.json").read_text()) | {"attention_bias": True}
    (tmp_path / "missing" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="attention_bias"):
        _load(tmp_path / "missing")


@pytest.mark.parametrize("name", engine_package.OPERATORS)
def test_an_operators_inputs_fit_its_naive_form(name):
    config = engine_package.engine.ModelConfig(
        128, 2, 4, 2, 32, 96, 200, 1e4, 1e-6, 512, False, (0,)
    )
    operator = engine_package.OPERATORS[name]
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    inputs = operator.inputs(config, 3, 70, generator, "cpu", torch.float32)
    wide = {k: _double(v) for k, v in inputs.items()}
    for got, want in zip(
        _tuple(operator.naive(**inputs)), _tuple(operator.naive(**wide)), strict=True
    ):
        assert torch.isfinite(got).all()
        assert torch.allclose(got.double(), want.double(), rtol=1e-4, atol=1e-4)


def _double(value):
    if isinstance(value, tuple):
        return tuple(_double(v) for v in value)
    return value.double() if torch.is_tensor(value) and value.is_floating_point() else value


def _tuple(value):
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_cuda_sources_compile_for_their_targets(arch):
    """A few seconds: one shape of each kind, with NVRTC, without a GPU."""
    from engine_qwen3_8b.kernels import cuda, skinny

    for mode, operator, k in ((0, "qkv", 4096), (1, "residual", 12288), (2, "gate_up", 4096)):
        shape = skinny._shape(operator, 4, k)
        defines = {name.upper(): value for name, value in asdict(shape).items()}
        defines |= {"MODE": mode, "K": k, "TOKENS": 4}
        assert cuda.compile_cubin("skinny.cu", defines, arch)
    heads = {"HEADS": 32, "KV_HEADS": 8, "SPLITS": 8, "GROUPS": 2, "STAGES": 2}
    assert cuda.compile_cubin("attention.cu", heads, arch)

"""The Qwen3.6 NVFP4 engine on the CPU: naive operators against transformers in float32.

A tiny random checkpoint is quantised in ModelOpt's layout; the oracle gets the same values, exactly
dequantised, so 1e-5 is the tolerance of arithmetic order alone. The kernels are compiled for both
targets without a GPU. About 40 s.
"""

import importlib.util
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parents[1] / "data/engines/qwen3.6-35b-a3b-nvfp4-h200"
TOLERANCE = 1e-5

TINY = {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "vocab_size": 304,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "eos_token_id": 303,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])


FULL_SIZES = "data/models/qwen3.6-35b-a3b-nvfp4"


def load_package():
    """Import the engine folder as the package `engine_qwen36`."""
    name = "engine_qwen36"
    if name not in sys.modules:
        where = [str(FOLDER)]
        spec = importlib.util.spec_from_file_location(
            name, FOLDER / "__init__.py", submodule_search_locations=where
        )
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def quantise_fp8(weight):
    scale = weight.abs().amax() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def quantise_nvfp4(weight):
    total = weight.abs().amax() / (6 * 448)
    blocks = weight.unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1) / 6 / total).clamp_min(2**-9).to(torch.float8_e4m3fn)
    scaled = blocks / (scale.float() * total)[..., None]
    index = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    values = E2M1[index] * scaled.sign() * (scale.float() * total)[..., None]
    codes = (index + 8 * (scaled < 0)).flatten(-2).to(torch.uint8)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": total}
    return tensors, values.flatten(-2)


class Maker:
    """Random tensors, stored twice: quantised for the engine, exact for the oracle."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.stored, self.exact = {}, {}

    def plain(self, name, *shape, scale=0.05, offset=0.0):
        value = (torch.randn(shape, generator=self.random) * scale + offset).bfloat16()
        self.stored["model.language_model." + name] = value
        self.exact["model." + name] = value.float()

    def quantised(self, name, rows, cols, quantise, scale=0.12):
        tensors, values = quantise(torch.randn(rows, cols, generator=self.random) * scale)
        prefix = "" if name == "lm_head" else "model.language_model."
        self.stored.update({f"{prefix}{name}.{key}": value for key, value in tensors.items()})
        return values

    def linear(self, name, rows, cols, quantise):
        prefix = "" if name == "lm_head" else "model."
        self.exact[f"{prefix}{name}.weight"] = self.quantised(name, rows, cols, quantise)


def fill_gdn(maker, name, c):
    heads, hidden = c["linear_num_value_heads"], c["hidden_size"]
    keys, values = c["linear_num_key_heads"] * 32, heads * 32
    maker.linear(name + "in_proj_qkv", 2 * keys + values, hidden, quantise_fp8)
    maker.linear(name + "in_proj_z", values, hidden, quantise_fp8)
    maker.linear(name + "out_proj", hidden, values, quantise_fp8)
    maker.plain(name + "in_proj_a.weight", heads, hidden, scale=0.1)
    maker.plain(name + "in_proj_b.weight", heads, hidden, scale=0.1)
    maker.plain(name + "conv1d.weight", 2 * keys + values, 1, 4, scale=0.4)
    maker.plain(name + "A_log", heads, scale=0.5)
    maker.plain(name + "dt_bias", heads, scale=0.5)
    maker.plain(name + "norm.weight", 32, offset=1.0)


def fill_attention(maker, name, c):
    width, kv = c["num_attention_heads"] * 32, c["num_key_value_heads"] * 32
    hidden = c["hidden_size"]
    rows = {"q_proj": 2 * width, "k_proj": kv, "v_proj": kv}
    for part, count in rows.items():
        maker.linear(name + part, count, hidden, quantise_fp8)
    maker.linear(name + "o_proj", hidden, width, quantise_fp8)
    maker.plain(name + "q_norm.weight", 32)
    maker.plain(name + "k_norm.weight", 32)


def fill_moe(maker, name, c):
    hidden, width = c["hidden_size"], c["moe_intermediate_size"]
    maker.plain(name + "gate.weight", c["num_experts"], hidden, scale=0.2)
    maker.plain(name + "shared_expert_gate.weight", 1, hidden, scale=0.2)
    shapes = {
        "gate_proj": (width, hidden),
        "up_proj": (width, hidden),
        "down_proj": (hidden, width),
    }
    for part, shape in shapes.items():
        maker.linear(f"{name}shared_expert.{part}", *shape, quantise_nvfp4)
    experts = {
        part: torch.stack(
            [
                maker.quantised(f"{name}experts.{e}.{part}", *shape, quantise_nvfp4)
                for e in range(c["num_experts"])
            ]
        )
        for part, shape in shapes.items()
    }
    gate_up = torch.cat((experts["gate_proj"], experts["up_proj"]), 1)
    maker.exact[f"model.{name}experts.gate_up_proj"] = gate_up
    maker.exact[f"model.{name}experts.down_proj"] = experts["down_proj"]


def make_checkpoint(folder, seed, c=TINY):
    """Write a ModelOpt checkpoint; return the oracle's exact state dict."""
    maker = Maker(seed)
    maker.plain("embed_tokens.weight", c["vocab_size"], c["hidden_size"], scale=1.0)
    for i, kind in enumerate(c["layer_types"]):
        name = f"layers.{i}."
        maker.plain(name + "input_layernorm.weight", c["hidden_size"])
        maker.plain(name + "post_attention_layernorm.weight", c["hidden_size"])
        if kind == "linear_attention":
            fill_gdn(maker, name + "linear_attn.", c)
        else:
            fill_attention(maker, name + "self_attn.", c)
        fill_moe(maker, name + "mlp.", c)
    maker.plain("norm.weight", c["hidden_size"])
    maker.linear("lm_head", c["vocab_size"], c["hidden_size"], quantise_nvfp4)
    maker.stored["mtp.fc.weight"] = torch.zeros(4)
    save_file({k: v.contiguous() for k, v in maker.stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(c))
    return maker


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
    got = engine.score(tokens, range(70))
    assert error(got, oracle(tokens)) < TOLERANCE


def test_prefill_may_be_split_anywhere(engine, oracle):
    tokens = random_tokens(41)
    want = oracle(tokens)
    cuts = sorted(np.random.default_rng().choice(np.arange(1, 41), 6, replace=False).tolist())
    bounds = [0, *cuts, 41]
    with torch.inference_mode():
        slot = engine.cache.allocate(len(tokens))
        for start, end in itertools.pairwise(bounds):
            logits = engine.runner.prefill(slot, start, tokens[start:end], True)
            assert error(logits[0].numpy(), want[end - 1]) < TOLERANCE


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
        (lambda e: e.submit([1] * 90, {"max_new_tokens": 7}), "max_new_tokens"),
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
    broken = {
        "missing": {k: v for k, v in maker.stored.items() if k != victim},
        "left over": {**maker.stored, "model.language_model.extra": torch.zeros(1)},
        "shape": {**maker.stored, victim: maker.stored[victim][:-1]},
        "dtype": {**maker.stored, victim: maker.stored[victim].float()},
    }
    for fault, tensors in broken.items():
        path = tmp_path / "model.safetensors"
        save_file({k: v.contiguous() for k, v in tensors.items()}, path)
        with pytest.raises(ValueError, match=fault) as caught:
            load_package().load(tmp_path, device="cpu", max_batch=1, max_context=8)
        assert "extra" in str(caught.value) or victim in str(caught.value)


@pytest.fixture(scope="module")
def cubins():
    """{target: {file: cubin}} of all kernels at the model's full sizes."""
    package = load_package()
    part = lambda name: importlib.import_module(f"{package.__name__}.{name}")  # noqa: E731
    config = part("config").read_config(FOLDER.parents[2] / FULL_SIZES)
    sizes = part("buffers").defines(config)
    return {target: part("cuda").build(target, sizes) for target in ("sm_90a", "sm_100a")}


def triton_tool(name, *arguments):
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_kernels_compile_without_spills(cubins, target, tmp_path):
    """Two small blocks or one large fit a multiprocessor; nothing but a few bytes goes to stack."""
    found = {}
    for name, cubin in cubins[target].items():
        path = tmp_path / f"{name}.cubin"
        path.write_bytes(cubin)
        usage = triton_tool("cuobjdump", "-res-usage", str(path))
        for kernel, registers, stack in re.findall(
            r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", usage
        ):
            found[kernel] = int(registers), int(stack)
    assert len(found) > 30
    assert {k: v for k, v in found.items() if v[1] > 16} == {}
    assert max(registers for registers, _ in found.values()) <= 168


def test_at_most_three_instructions_per_weight(cubins, tmp_path):
    """The loop over NVFP4 slices of the single-token head: 256 weights a lane each turn."""
    path = tmp_path / "single.cubin"
    path.write_bytes(cubins["sm_90a"]["single.cu"])
    text = triton_tool("nvdisasm", "-c", str(path))
    body = text.split(".text.single_head:")[1].split(".section")[0]
    lines = body.splitlines()
    label = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\.L_x_\d+):", line))}
    loops = []
    for i, line in enumerate(lines):
        jump = re.search(r"BRA.*(\.L_x_\d+)", line)
        if jump and label.get(jump[1], i) < i:
            loops.append(lines[label[jump[1]] : i])
    largest = max(loops, key=lambda loop: sum("HMMA" in line for line in loop))
    assert sum("HMMA" in line for line in largest) == 32
    instructions = sum(bool(re.search(r"/\*[0-9a-f]{4,5}\*/", line)) for line in largest)
    print("instructions per weight", instructions / 256)
    assert instructions <= 3 * 256


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

"""The tensor-parallel Qwen3-8B engine on a CPU: gloo, float32, 1, 2 and 4 ranks, at 1e-5.

Ranks are processes that get the same calls. About 40 s; kernels are compiled, not run.
"""

import importlib.util
import itertools
import multiprocessing
import os
import random
import socket
import sys
import time
from dataclasses import asdict

import numpy as np
import pytest
import torch

from metainfer_lab.paths import ENGINES

VOCAB = 320
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch.distributed", "numpy", "safetensors"])


def _package():
    folder = ENGINES / "qwen3-8b-bf16-tp-h200"
    spec = importlib.util.spec_from_file_location(
        "engine_qwen3_8b_tp", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["engine_qwen3_8b_tp"] = package
    spec.loader.exec_module(package)
    return package


def _serve(pipe, environment):
    """A rank: one engine, whose methods the parent calls by name."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    package, engine = _package(), None
    while True:
        name, arguments, options = pipe.recv()
        try:
            if name == "load":
                engine, answer = package.load(*arguments, **options), None
            else:
                answer = getattr(engine, name)(*arguments, **options)
        except Exception as error:
            answer = error.with_traceback(None)
            answer = (type(error).__name__, str(error))
        pipe.send(answer)


class Ranks:
    """An engine of several processes: every call goes to all, and all must answer the same."""

    def __init__(self, world):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        self.world, self.pipes, self.processes = world, [], []
        for _ in range(world):
            pipe, end = FORKS.Pipe()
            self.processes.append(FORKS.Process(target=_serve, args=(end, address), daemon=True))
            self.processes[-1].start()
            end.close()
            self.pipes.append(pipe)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.join()

    def ask(self, name, *arguments, rank=None, **options):
        """Sends a call; `rank` has it told to each rank."""
        for index, pipe in enumerate(self.pipes):
            extra = {} if rank is None else {rank: index}
            pipe.send((name, arguments, options | extra))

    def load(self, folder, **arguments):
        settings = {"device": "cpu", "max_batch": 4, "max_context": 512} | arguments
        self.ask("load", str(folder), world=self.world, rank="rank", **settings)
        return self._answer()

    def __getattr__(self, name):
        def call(*arguments, **options):
            self.ask(name, *arguments, **options)
            return self._answer()

        return call

    def _answer(self):
        answers = [pipe.recv() for pipe in self.pipes]
        for answer in answers[1:]:
            assert _plain(answer) == _plain(answers[0])  # every bit, on every rank
        if isinstance(answers[0], tuple):
            raise ValueError(": ".join(answers[0]))
        return answers[0]


def _plain(answer):
    return answer.tobytes() if isinstance(answer, np.ndarray) else answer


engine_package = _package()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random Qwen3 of transformers, and its folder; fewer key-value heads than ranks."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(random.randrange(2**31))
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=8,
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


@pytest.fixture(scope="module", params=(1, 2, 4))
def ranks(request):
    """Processes of one world; each test loads its own engine into them."""
    with Ranks(request.param) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def pair():
    with Ranks(2) as ranks:
        yield ranks


def _prompt(length):
    return [random.randrange(VOCAB - 1) for _ in range(length)]


def _reference(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].double()


def _finish(engine, limit=1000):
    """Steps until nothing is left; (token, logprob, top, reason) by request."""
    out = {}
    for _ in range(limit):
        for request, *step in engine.step():
            out.setdefault(request, []).append(step)
        stats = engine.stats()
        if not stats["running"] and not stats["waiting"]:
            return out
    raise AssertionError("the engine does not come to an end")


def _run(engine, prompts, **params):
    ids = [engine.submit(p, {"ignore_eos": True, "max_new_tokens": 8} | params) for p in prompts]
    out = _finish(engine)
    return [out[i] for i in ids]


def _assert_greedy(model, prompt, steps):
    """Each token is the reference's choice on the engine's own text, with its log-probability."""
    tokens = [step[0] for step in steps]
    logprobs = _reference(model, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
    for row, (token, logprob, _, _) in enumerate(steps):
        assert logprobs[row].max() - logprobs[row, token] < 1e-4
        assert abs(logprobs[row, token] - logprob) < 1e-4


def test_score_equals_transformers_on_1_2_and_4_ranks(model, ranks):
    reference, folder = model
    ranks.load(folder, max_context=1200)
    tokens = _prompt(1100)
    positions = [*random.sample(range(1100), 40), 1099, 1023, 1024, 0]
    got, want = ranks.score(tokens, positions), _reference(reference, tokens)[positions].numpy()
    assert got.dtype == np.float32
    assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


def test_decode_of_arriving_requests_on_1_2_and_4_ranks(model, ranks):
    reference, folder = model
    ranks.load(folder)
    prompts = [_prompt(n) for n in (1, 63, 64, 65, 130, 5)]
    ids, out = [], {}
    for prompt in prompts:  # more than slots, arriving while others run
        limit = random.randrange(1, 20)
        ids.append(ranks.submit(prompt, {"max_new_tokens": limit, "ignore_eos": True}))
        for request, *step in itertools.chain(*(ranks.step() for _ in range(3))):
            out.setdefault(request, []).append(step)
    for request, steps in _finish(ranks).items():
        out.setdefault(request, []).extend(steps)
    for prompt, request in zip(prompts, ids, strict=True):
        _assert_greedy(reference, prompt, out[request])


def test_draws_without_a_seed_are_the_same_on_all_ranks(model, ranks):
    """Ranks that drew for themselves would part at the first token."""
    reference, folder = model
    ranks.load(folder)
    prompts = [_prompt(n) for n in (70, 3)]
    free = _run(ranks, prompts, temperature=1.5, logprobs=3)
    other = _run(ranks, prompts, temperature=1.5, logprobs=3)
    assert [s[0] for s in free[0]] != [s[0] for s in other[0]]
    for prompt, steps in zip(prompts * 2, free + other, strict=True):
        tokens = [step[0] for step in steps]
        logprobs = _reference(reference, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
        for row, (token, logprob, top, _) in enumerate(steps):
            assert abs(logprobs[row, token] - logprob) < 1e-4
            assert [pair[0] for pair in top] == logprobs[row].topk(3).indices.tolist()


def test_prefixes_pressure_and_cancellation_on_two_ranks(model, pair):
    reference, folder = model
    pair.load(folder, max_batch=1, max_context=64)
    page = pair.stats()["cache_bytes_total"] // 2
    pair.load(folder, max_context=320, cache_bytes=9 * page)
    prompts = [_prompt(n) for n in (100, 190, 150)]
    prompts.append(prompts[0])
    for prompt, steps in zip(prompts, _run(pair, prompts, max_new_tokens=60), strict=True):
        _assert_greedy(reference, prompt, steps)
    hits = pair.stats()["prefix_hit_tokens"]
    gone = pair.submit(prompts[1], {})
    pair.step()
    pair.cancel(gone)
    _assert_greedy(reference, prompts[2], _run(pair, [prompts[2]])[0])
    stats = pair.stats()
    assert stats["preemptions"] > 0 and stats["prefix_hit_tokens"] > hits
    assert stats["cache_bytes_used"] == 0 and stats["cache_bytes_total"] <= 9 * page


def test_the_same_calls_give_the_same_bits(model, pair):
    _, folder = model
    prompts, runs = [_prompt(n) for n in (70, 3, 20)], []
    for _ in range(2):
        pair.load(folder)
        runs.append(_run(pair, prompts, temperature=0.7, seed=5))
    assert runs[0] == runs[1]


def test_tied_embeddings_are_split_too(model, tmp_path):
    reference, _ = model
    config = reference.config.to_dict() | {"tie_word_embeddings": True}
    tied = type(reference)(type(reference.config)(**config)).eval()
    tied.save_pretrained(tmp_path)
    with Ranks(2) as ranks:
        ranks.load(tmp_path)
        tokens = _prompt(30)
        got, want = ranks.score(tokens, [0, 29]), _reference(tied, tokens)[[0, 29]].numpy()
    assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


def test_a_killed_rank_is_a_named_error_within_seconds(model):
    _, folder = model
    with Ranks(2) as ranks:
        ranks.load(folder)
        ranks.submit(_prompt(20), {"max_new_tokens": 200, "ignore_eos": True})
        ranks.step()
        ranks.processes[1].kill()
        ranks.processes[1].join()
        started = time.monotonic()
        ranks.pipes[0].send(("step", (), {}))
        assert ranks.pipes[0].poll(20)
        name, text = ranks.pipes[0].recv()
        ranks.pipes[0].send(("close", (), {}))
        assert ranks.pipes[0].poll(20) and ranks.pipes[0].recv() is None
    assert name == "LostRank" and "rank 0 of 2" in text
    assert time.monotonic() - started < 10


def test_what_does_not_divide_is_refused_by_name(model):
    _, folder = model
    with pytest.raises(ValueError, match="world: 3"):
        engine_package.load(folder, device="cpu", max_batch=1, max_context=64, world=3)
    with pytest.raises(ValueError, match="rank: 2"):
        engine_package.load(folder, device="cpu", max_batch=1, max_context=64, rank=2, world=2)
    config = engine_package.engine.ModelConfig.from_folder(folder)
    for name, value in (("num_attention_heads", 6), ("intermediate_size", 162), ("vocab_size", 1)):
        changed = type(config)(**asdict(config) | {name: value})
        with pytest.raises(ValueError, match=name):
            changed.shard(4)


def test_numbers_of_exchanges_run_on_from_step_to_step():
    """Two buffers are enough only if no number is left out and none comes twice."""
    from engine_qwen3_8b_tp.group import Group
    from engine_qwen3_8b_tp.kernels.exchange import Exchange, arguments

    group = Group(0, 2)
    group.exchange = exchange = object.__new__(Exchange)
    exchange.control, exchange.count = torch.tensor([1, 0], dtype=torch.int32), 7
    exchange.peers, exchange.bytes_per_rank, numbers = None, 64, []
    for _ in range(20):
        with group.step():
            for _ in range(random.randrange(1, 6)):
                numbers.append(exchange.control[0].item() + arguments(group)[3])
    assert numbers == list(range(1, 1 + len(numbers)))


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


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_tiles_divide_the_model_for_every_world(world, tokens):
    """What skinny.cu asserts, and that blocks which wait for another GPU are all there at once."""
    from engine_qwen3_8b_tp.kernels.skinny import SMS, _shape

    products = {
        "qkv": (6144 // world, 4096),
        "gate_up": (24576 // world, 4096),
        "head": (151936 // world, 4096),
    }
    residual = [("residual", 4096, 4096 // world), ("residual", 4096, 12288 // world)]
    for name, rows, k in [(name, *sizes) for name, sizes in products.items()] + residual:
        shape = _shape(name, tokens, rows, k)
        assert k % (shape.bk * shape.cluster) == 0 and shape.bk // 16 % shape.wk == 0
        slot = 16 if name == "residual" else 4  # rows that a thread or four finish
        assert shape.rows % (16 * shape.wr) == 0 and shape.rows % (slot * shape.cluster) == 0
        assert shape.rows * shape.bk // 8 % (32 * shape.wr * shape.wk) == 0
        assert shape.shared_bytes(tokens) <= 232448 - 2048 and shape.stages >= 2
        if name == "residual":
            assert -(-rows // shape.rows) * shape.cluster <= SMS


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_kernels_that_exchange_compile_for_their_targets(arch, world):
    from engine_qwen3_8b_tp.kernels import cuda, skinny

    shape = skinny._shape("residual", 32, 4096, 12288 // world)
    defines = {name.upper(): value for name, value in asdict(shape).items()}
    defines |= {"MODE": skinny.RESIDUAL, "WORLD": world, "K": 12288 // world, "TOKENS": 32}
    assert cuda.compile_cubin("skinny.cu", defines, arch)
    assert cuda.compile_cubin("pick.cu", {"WORLD": world}, arch)


@pytest.mark.parametrize(
    ("mode", "operator", "tokens", "rows", "k"),
    [(0, "qkv", 4, 384, 128), (0, "qkv", 32, 128, 640), (1, "residual", 32, 128, 128)],
)
def test_shapes_of_a_tiny_model_compile(mode, operator, tokens, rows, k):
    """What the gates met on a GPU: half a warp's tile, a cluster too large, a ring too short."""
    from engine_qwen3_8b_tp.kernels import cuda, skinny

    defines = {
        name.upper(): n for name, n in asdict(skinny._shape(operator, tokens, rows, k)).items()
    }
    defines |= {"MODE": mode, "WORLD": 1, "K": k, "TOKENS": tokens}
    assert cuda.compile_cubin("skinny.cu", defines, "sm_90a")

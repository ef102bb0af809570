"""Clocks, turns and baselines; 15 s, two of the processes load torch."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from metainfer_lab.bench import compare, products, timing
from metainfer_lab.bench.worker import Worker, WorkerError
from metainfer_lab.bench.workload import Workload
from metainfer_lab.cli import app
from metainfer_lab.engine import host as host_module
from metainfer_lab.engine import session
from metainfer_lab.errors import InputError
from metainfer_lab.model import ModelDims
from metainfer_lab.paths import ENGINES, ROOT

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def clocked(events: list[tuple[float, int, int]], n_streams: int) -> timing.Sample:
    """A sample of events (arrival in s, stream, token) under a clock that shows those times."""
    times = iter([0.0, *(at for at, _, _ in events)])
    pairs = [(stream, token) for _, stream, token in events]
    return timing.sample_from(pairs, [[1]] * n_streams, clock=lambda: next(times))


def test_one_stream_by_the_definitions():
    sample = clocked([(0.5, 0, 7), (0.6, 0, 8), (0.8, 0, 9)], 1)
    assert sample.tokens == [[7, 8, 9]]
    assert sample.ttft_ms == pytest.approx(500)
    assert sample.tpot_ms == pytest.approx(150)
    assert sample.decode_tok_s == pytest.approx(2 / 0.3)
    assert sample.output_tok_s == pytest.approx(3 / 0.8)


def test_rate_of_streams_counts_only_while_all_decode():
    """Stream 1 starts late and ends late: its lonely tail is no two-stream rate."""
    a = [(0.1 * step, 0, step) for step in range(1, 6)]
    b = [(0.1 * step + 0.05, 1, step) for step in range(3, 11)]
    sample = clocked(sorted(a + b), 2)
    # between 0.35 (last first token) and 0.5 (first last token): 0.4, 0.45, 0.5
    assert sample.decode_tok_s == pytest.approx(3 / 0.15)


def test_short_or_disjoint_streams_are_no_measurement():
    with pytest.raises(ValueError, match="sent 1"):
        clocked([(0.1, 0, 1)], 1)
    with pytest.raises(ValueError, match="never all"):
        clocked([(0.1, 0, 1), (0.2, 0, 1), (0.3, 1, 1), (0.4, 1, 1)], 2)


class Host:
    """An engine's process that answers each request with three tokens, a step every 10 ms."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.together: list[int] = []

    def submit(self, prompt: list[int], params: dict) -> int:
        request = prompt[0]
        self.left[request] = 3
        return request

    def run(self):
        while self.left:
            time.sleep(0.01)
            self.together.append(len(self.left))
            made = [SimpleNamespace(request=request, token=7) for request in self.left]
            self.left = {r: n - 1 for r, n in self.left.items() if n > 1}
            yield SimpleNamespace(results=made)


@pytest.mark.parametrize(("gap_ms", "together"), [(0, [4] * 3), (10, None), (300, [1] * 12)])
def test_streams_start_at_once_or_one_after_the_other(gap_ms, together):
    """A stream joins while others run, or after they ended; its TTFT counts from its own start."""
    workload = Workload(prompt_len=1, output_len=3, concurrency=4, gap_ms=gap_ms)
    engine, starts = SimpleNamespace(process=Host()), []
    prompts = [[0], [1], [2], [3]]
    got = [*compare._events(engine, workload, prompts, starts)]
    assert sorted(got) == sorted((stream, 7) for stream in range(4) for _ in range(3))
    assert all(start - starts[0] >= 0.95e-3 * gap_ms * i for i, start in enumerate(starts))
    # in between, how many meet is the machine's to say
    assert together is None or engine.process.together == together


def test_first_token_times_count_from_each_streams_start():
    times = iter([0.0, 0.5, 0.6, 1.5, 1.6, 1.7, 1.8])
    pairs = [(0, 1), (0, 1), (1, 1), (0, 1), (1, 1), (0, 1)]
    sample = timing.sample_from(pairs, [[1]] * 2, clock=lambda: next(times), starts=[0.0, 1.2])
    assert sample.ttft_ms == pytest.approx((500 + 300) / 2)


@pytest.mark.parametrize(
    ("device_ms", "says"), [(102.0, "1.020 of the host clock"), (None, None), (130, 0), (60, 0)]
)
def test_the_clock_of_the_gpu_is_held_against_the_hosts(device_ms, says):
    """0.1 s for eleven tokens: what goes on after the last one is no part of what was timed."""
    sample = clocked([(0.01 * at, 0, 7) for at in range(11)], 1)
    samples = [replace(sample, device_ms=device_ms)]
    if says == 0:
        with pytest.raises(InputError, match=f"100.0 ms by the host's clock and {device_ms}.0 ms"):
            timing.agreement(samples)
    else:
        assert timing.agreement(samples) == ({"device_events": says} if says else {})


def test_a_run_on_a_gpu_stands_between_two_marks_of_its_clock(monkeypatch):
    """The host's side with a stand-in for the GPU's events; a CPU is never asked for any."""
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = None if enable_timing else 0

        def record(self) -> None:
            self.at = 25.0 * len(done)

        def synchronize(self) -> None:
            assert self.at is not None

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("all work"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    settings = dict.fromkeys(("commands", "results", "folder"), 0) | {"world": 1}
    host, process = host_module.Host(None, settings), Host()
    process.mark = lambda: host.do_mark()["ms"]
    for device, marks in (("cpu", None), ("cuda", 25.0), ("cuda", 25.0)):
        engine = SimpleNamespace(device=device, process=process, folder=Path("e"))
        plan = SimpleNamespace(dims=SimpleNamespace(vocab_size=9))
        measured = compare.Measurement("e", "t", plan, Workload(prompt_len=1, output_len=3))
        assert compare._engine_runner(engine, measured)().device_ms == marks
    assert len(done) == 4


def test_turns_go_there_and_back():
    order: list[str] = []
    runners = {name: (lambda n=name: order.append(n) or len(order)) for name in "AB"}
    results = timing.in_turn(runners, runs=4)
    assert "".join(order) == "ABBAABBA"
    assert results["A"] == [1, 4, 5, 8]


def test_linear_drift_cancels_in_the_ratio():
    """A machine that slows by 2 % a run; in fixed order A would win by that much."""
    speed = iter(100 * 0.98**step for step in range(16))
    runs = timing.in_turn({name: lambda: next(speed) for name in "AB"}, runs=8)
    assert timing.paired_ratio(runs["A"], runs["B"]).median == pytest.approx(1, abs=0.005)


def test_prompts_are_unique_and_secret_by_default():
    workload = Workload(prompt_len=8, output_len=2, concurrency=3)
    one, two = workload.prompts(1000), workload.prompts(1000)
    seen = [tuple(p) for _ in range(5) for source in (one, two) for p in next(source)]
    assert len(set(seen)) == 30 and {len(p) for p in seen} == {8}
    assert next(workload.prompts(50, seed=3)) == next(workload.prompts(50, seed=3))


def test_product_shapes_are_the_matrices_of_one_token():
    dims = ModelDims.from_config(LLAMA)
    layer = [(64, 64), (32, 64), (32, 64), (64, 64), (96, 64), (96, 64), (64, 96)]
    assert sorted(products.product_shapes(dims)) == sorted([*layer, *layer, (128, 64)])


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_products_run_in_their_own_process(precision):
    with products.Products(ModelDims.from_config(LLAMA), precision, threads=1) as bare:
        assert bare.threads == 1 and bare.rate(passes=3) > 10


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--batches", "1,a"], "--batches 1,a: write whole numbers"),
        (["--batches", "0"], "workload: concurrency: .* greater than or equal to 1"),
        (["--verdict", "nowhere.json"], "--verdict nowhere.json: not what"),
        (["--verdict", "pyproject.toml"], "--verdict pyproject.toml: not what"),
        (["--spec", "qwen3-8b-bf16-h200"], "is for h200, and this machine has no NVIDIA GPU"),
    ],
)
def test_bad_arguments_of_the_command_are_one_line(arguments, says, monkeypatch):
    monkeypatch.setattr(session, "has_nvidia_driver", lambda: False)
    monkeypatch.chdir(ROOT)
    engine = ENGINES / ("qwen3-8b-bf16-h200" if "--spec" in arguments else "qwen3-reference")
    error = CliRunner().invoke(app, ["bench", str(engine), *arguments]).exception
    assert isinstance(error, InputError) and re.search(says, str(error)), error


def test_products_of_unknown_precision_are_refused():
    with pytest.raises(InputError, match="nvfp4"):
        products.Products(ModelDims.from_config(LLAMA), "nvfp4")


def test_dead_worker_says_its_last_words():
    worker = Worker("metainfer_lab.bench.products")
    with worker, pytest.raises(WorkerError, match="no_such_operation"):
        worker.call(op="no_such_operation")
    assert worker.process.poll() is not None


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    settings = {key: value for key, value in LLAMA.items() if key != "model_type"}
    LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(folder)
    return folder


def test_transformers_settings_agree_on_the_tokens(tiny):
    """Every setting that may be called the best computes the same greedy continuation."""
    from metainfer_lab.bench.transformers import Transformers

    workload = Workload(prompt_len=6, output_len=5)
    prompts = next(workload.prompts(128))
    with Transformers(tiny) as rival:
        best = rival.find_best(workload, 128, output_len=3)
        assert best in rival.trials and len(rival.trials) == len(rival.candidates)
        answers = []
        for setting in rival.candidates:
            rival.setting = setting
            answers.append(rival.sample(prompts, workload).tokens)
    assert all(answer == answers[0] for answer in answers), json.dumps(answers)
    assert len(answers[0][0]) == 5

"""Baselines that are not installed here, in the shape of their packages; about 10 s."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from metainfer_lab.bench import compare, llamacpp, rival, rivals
from metainfer_lab.bench.vllm import Vllm
from metainfer_lab.bench.worker import WorkerError
from metainfer_lab.bench.workload import Workload
from metainfer_lab.checkpoints import smollm2
from metainfer_lab.errors import InputError
from metainfer_lab.spec import Spec

VLLM = """
import os
from types import SimpleNamespace
__version__ = "0.0-stub"
sampling_params = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"))

def SamplingParams(**fields):
    assert fields["ignore_eos"] and fields["output_kind"] == "delta" and not fields["temperature"]
    return SimpleNamespace(**fields)

class Engine:
    def __init__(self):
        self.waiting = {}
    def add_request(self, name, prompt, params):
        assert name not in self.waiting
        self.waiting[name] = [prompt["prompt_token_ids"][-1], params.max_tokens]
    def has_unfinished_requests(self):
        return bool(self.waiting)
    def step(self):
        made = []
        for name, state in list(self.waiting.items()):
            state[0], state[1] = state[0] + 1, state[1] - 1
            if not state[1]:
                del self.waiting[name]
            made.append(SimpleNamespace(request_id=name,
                outputs=[SimpleNamespace(token_ids=[state[0]])]))
        return made[::-1]

class LLM:
    def __init__(self, model, **fields):
        assert not fields["enable_prefix_caching"] and fields["max_num_seqs"] == 3
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] in "01"
        assert 0 < fields["gpu_memory_utilization"] < 1
        self.llm_engine = Engine()
"""
LLAMA_CPP = """
__version__ = "0.0-stub"

def llama_print_system_info():
    return b"CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | "

class Llama:
    def __init__(self, path, **fields):
        assert path.endswith("F32.gguf") and fields["n_ctx"] == 64
    def reset(self):
        pass
    def generate(self, tokens, **fields):
        assert fields["temp"] == 0
        while True:
            yield tokens[-1] + 1
"""
TORCH = """
__version__ = "0.0-stub"
class cuda:
    @staticmethod
    def mem_get_info():
        return 60, 100
"""
WORKLOAD = Workload(prompt_len=4, output_len=6, concurrency=3)
PROMPTS = [[0, 0, 0, 10], [0, 0, 0, 20], [0, 0, 0, 30]]


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Stand-ins for packages, seen by this process and by the workers it starts."""

    def install(**sources: str) -> None:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.syspath_prepend(tmp_path)

    return install


@pytest.mark.parametrize("in_process", [True, False])
def test_vllm_is_stepped_and_its_streams_kept_apart(packages, monkeypatch, tmp_path, in_process):
    packages(vllm=VLLM, torch=TORCH)
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    monkeypatch.setenv("METAINFER_VLLM", '{"seed": 1}')
    with Vllm(tmp_path, 3, 64, in_process=in_process) as vllm:
        first, second = vllm.sample(PROMPTS, WORKLOAD), vllm.sample(PROMPTS, WORKLOAD)
    assert first.tokens == second.tokens == [[n + i for i in range(1, 7)] for n in (10, 20, 30)]
    assert vllm.describe()["process"] == ("in-process" if in_process else "default")
    assert vllm.versions["vllm"] == "0.0-stub" and vllm.describe()["prefix_cache"] == "off"
    assert vllm.describe()["language_model_only"] is True and vllm.describe()["seed"] == 1


def test_a_rival_may_take_its_time_to_start_and_not_to_answer(packages, monkeypatch, tmp_path):
    packages(vllm=VLLM, torch=TORCH)
    (tmp_path / "config.json").write_text("{}")
    with Vllm(tmp_path, 3, 64, in_process=True) as one:
        assert one.ready_s > 0 and one.worker.timeout_s == 300 < rival.OPENING_S
    monkeypatch.setattr(rival, "OPENING_S", 0.01)
    with pytest.raises(WorkerError, match=r"silent for 0\.01 s"):
        Vllm(tmp_path, 3, 64, in_process=True).__enter__()


def test_llama_cpp_says_how_it_was_built(packages, monkeypatch, tmp_path):
    packages(llama_cpp=LLAMA_CPP)
    monkeypatch.setattr(llamacpp, "gguf", lambda precision: tmp_path / "smollm2.F32.gguf")
    with llamacpp.LlamaCpp(smollm2.NAME, "fp32", 64) as rival:
        sample = rival.sample([[1, 7]], Workload(prompt_len=2, output_len=5))
    assert sample.tokens == [[8] * 5]
    assert rival.describe()["gguf"] == "F32" and rival.describe()["built_with"] == "SSE3 AVX2"


def test_what_cannot_run_here_is_refused_by_name(packages):
    with pytest.raises(InputError, match="vllm is not installed"):
        Vllm(Path("anything"), 3, 64, in_process=True)
    with pytest.raises(InputError, match="llama-cpp-python is not installed"):
        llamacpp.LlamaCpp(smollm2.NAME, "fp32", 64)
    packages(llama_cpp=LLAMA_CPP)
    with pytest.raises(InputError, match=r"not Qwen/Qwen3-8B in bf16"):
        llamacpp.LlamaCpp("Qwen/Qwen3-8B", "bf16", 64)
    with pytest.raises(InputError, match="one stream"):
        llamacpp.single(3)


def test_rivals_are_those_asked_for_and_those_of_the_goals():
    spec = Spec.load("smollm2-135m-fp32-cpu").change(
        goals={"ratio_to": {"transformers": 1.0}, "fraction_of_products": 0.5}
    )
    assert rivals.chosen(spec, ["llama.cpp"]) == ["llama.cpp", "transformers", "products"]
    with pytest.raises(InputError, match="sglang9"):
        rivals.chosen(spec, ["sglang9"])


def test_experts_are_counted_over_the_steps_between_two_looks():
    """A mean over an engine's life would mix 32 streams with what came before them."""
    before, after = ({"expert_steps": n, "experts_touched": x} for n, x in ((10, 100.0), (30, 140)))
    assert compare.touched(before, after) == pytest.approx(160)
    assert compare.touched({"expert_steps": 0, "experts_touched": None}, before) == 100
    assert compare.touched(after, after) is None
    assert compare.touched({}, {"experts_touched": 7.0}) == 7.0


def test_gpu_memory_is_that_of_a_process_and_of_those_it_started(monkeypatch):
    said = f"1, 512\n{os.getpid()}, 2048\n{os.getppid()}, 999\n{os.getpid()}, [N/A]\n"
    monkeypatch.setattr(rivals.subprocess, "check_output", lambda *_, **__: said)
    assert rivals.gpu_memory(os.getpid()) == {"gpu_gib": 2.0}

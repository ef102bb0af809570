"""The speed gate's judgement on fabricated clocks; one real comparison on a tiny model (30 s)."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from metainfer_lab import paths
from metainfer_lab.bench import compare, results
from metainfer_lab.bench.timing import Sample
from metainfer_lab.bench.workload import Workload
from metainfer_lab.engine import Engine
from metainfer_lab.errors import InputError
from metainfer_lab.gates.trial import Trial
from metainfer_lab.gates.verdict import NotJudged
from metainfer_lab.hardware import Hardware
from metainfer_lab.model import ModelDims
from metainfer_lab.plan import plan
from metainfer_lab.spec import Spec

# `metainfer_lab.gates.speed` names the gate's function once the package is imported
speed = import_module("metainfer_lab.gates.speed")
FP32 = Spec.load("smollm2-135m-fp32-cpu")
TWICE = FP32.change(goals={"ratio_to": {"transformers": 1.6}})


def sample(rate: float, tokens: list[int] | None = None) -> Sample:
    out = [tokens or [3, 1, 2, 3, 1, 2, 3, 1, 2, 3]]
    return Sample([[1, 2]], out, 100.0, 1000 / rate, rate, rate * 0.9)


class OracleStandIn:
    """Says that token (position mod 4) is the best, by a margin of 1."""

    def logits(self, tokens: list[int], positions: list[int]) -> np.ndarray:
        return np.eye(4)[[position % 4 for position in positions]]

    def routed(self, tokens: list[int], positions: list[int], experts=None, rounding=None):
        return self.logits(tokens, positions), None


@pytest.fixture
def gate(monkeypatch, tmp_path):
    """Runs the gate on given rates; returns its findings."""

    def run(spec: Spec, ours: list, products: list = (), rival: list = (), tokens=None):
        trial = Trial(tmp_path, spec, "cpu", "none", tmp_path, rng=np.random.default_rng())
        measured = compare.Measurement("mine", "tree", plan(spec), Workload.from_spec(spec))
        measured.samples = {"mine": [sample(rate, tokens) for rate in ours]}
        if rival:
            measured.samples["transformers"] = [sample(rate) for rate in rival]
        measured.products = list(products)
        monkeypatch.setattr(speed, "measure", lambda *a, **k: measured)
        monkeypatch.setattr(speed, "_quiet", lambda: True)
        monkeypatch.setattr(Trial, "real", lambda self: tmp_path)
        monkeypatch.setattr(Trial, "oracle", lambda self, checkpoint: OracleStandIn())
        monkeypatch.setattr(speed, "Engine", _NoEngine)
        speed.speed(trial)
        return trial.findings

    return run


class _NoEngine:
    class process:
        level, sockets = "none", False

    def __init__(self, *args: object) -> None:
        pass

    def __enter__(self) -> _NoEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


RIGHT = [(2 + index - 1) % 4 for index in range(10)]


def test_goals_are_ratios_to_what_ran_beside(gate):
    assert not gate(FP32, [41, 40, 42], products=[50, 50, 50], tokens=RIGHT).failures
    (failure,) = gate(FP32, [38, 39, 38], products=[50, 50, 50], tokens=RIGHT).failures
    assert "0.76, at least 0.8" in failure.detail
    assert not gate(TWICE, [50, 50, 50], rival=[30, 30, 30], tokens=RIGHT).failures
    (failure,) = gate(TWICE, [45, 45, 45], rival=[30, 30, 30], tokens=RIGHT).failures
    assert failure.case == "decode rate over transformers"


def test_absolute_goals(gate):
    asked = FP32.change(goals__fraction_of_products=None, goals__tok_s=50, goals__ttft_ms=90)
    cases = {failure.case for failure in gate(asked, [40, 40], tokens=RIGHT).failures}
    assert cases == {"decode tok/s", "ttft_ms"}


def test_fast_and_wrong_fails(gate):
    """Every tenth token is checked: ten wrong ones of ten cannot slip through."""
    wrong = [(token + 1) % 4 for token in RIGHT]
    failures = gate(FP32, [45], products=[50], tokens=wrong).failures
    assert failures and "behind token" in failures[0].detail


def test_nan_rate_is_no_pass(gate):
    assert gate(FP32, [float("nan")], products=[50], tokens=RIGHT).failures


@pytest.mark.parametrize("beside", [[50, 10, 50, 10, 50], [*[50] * 9, 1]], ids=["often", "once"])
def test_busy_machine_is_not_judged(gate, beside):
    with pytest.raises(NotJudged, match="busy"):
        gate(FP32, [45] * len(beside), products=beside, tokens=RIGHT)


def test_other_machine_or_no_goals_is_not_judged(gate):
    with pytest.raises(NotJudged, match="ran on a CPU"):
        gate(Spec.load("qwen3-8b-bf16-h200"), [1])
    with pytest.raises(NotJudged, match="no goals"):
        gate(FP32.change(goals__fraction_of_products=None), [1])


@pytest.fixture(scope="module")
def tiny_spec(tmp_path_factory) -> Spec:
    from metainfer_lab.checkpoints.tiny import draw_dims, tiny_checkpoint

    folder = tmp_path_factory.mktemp("bench") / "tiny"
    dims = draw_dims(np.random.default_rng(), ModelDims.load("smollm2-135m"), {})
    tiny_checkpoint("llama", 11, folder, **dims)
    changed = FP32.change(model=str(folder), checkpoint__source=str(folder))
    return changed.change(workload__max_context=128)


class _Passed:
    """What bench needs of a verdict."""

    hash = "v"

    def model_dump_json(self) -> str:
        return '{"passed": true}'


def test_bench_of_a_real_engine_gives_rows_of_the_schema(tiny_spec, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "LOCAL", paths.LOCAL / "test-bench")
    # long enough that a late look at the pipe cannot swallow a whole run of a tiny model
    workload = Workload(prompt_len=5, output_len=64, runs=3)
    reference = paths.ENGINES / "qwen3-reference"
    with Engine(reference, tiny_spec) as engine:
        rows = compare.bench(
            engine, beside=["transformers", "products"], workload=workload, verdict=_Passed()
        )
        with pytest.raises(InputError, match="vllm9"):
            compare.bench(engine, beside=["vllm9"])
    ours = rows[rows["engine"] == "qwen3-reference"]
    assert set(ours["metric"]) == {"ttft_ms", "tpot_ms", "decode_tok_s", "output_tok_s"}
    assert (ours["engine_tree"] == paths.tree_hash(reference)).all()
    assert (ours["verdict"] == "v").all() and (ours["n"] == 3).all()
    saved = Path(paths.ROOT / rows.attrs["saved"])
    assert len(results.read(saved)) == len(rows)
    assert saved.with_suffix(".verdict.json").read_text() == '{"passed": true}\n'
    assert set(rows["engine"]) == {"qwen3-reference", "transformers", "products"}
    assert set(rows.attrs["ratios"]) == {"transformers", "products"}
    raw = Path(paths.ROOT / rows["raw"].iloc[0])
    assert raw.is_file() and raw.is_relative_to(paths.LOCAL)


def test_a_sweep_measures_each_number_of_streams(tiny_spec, monkeypatch):
    monkeypatch.setattr(paths, "LOCAL", paths.LOCAL / "test-bench")
    engine = Engine(paths.ENGINES / "qwen3-reference", tiny_spec)
    rows = compare.sweep(engine, [1, 3], prompt_len=5, output_len=48, runs=2)
    assert rows.groupby("batch").size().to_dict() == {1: 4, 3: 4}
    assert set(rows["engine"]) == {"qwen3-reference"}, "nobody asked for rivals"
    for saved, batch in zip(rows.attrs["saved"].split(), (1, 3), strict=True):
        assert set(results.read(paths.ROOT / saved)["batch"]) == {batch}


@pytest.mark.parametrize(("name", "passes"), [("NVIDIA H200", True), ("NVIDIA B200", False)])
def test_rows_name_the_gpu_that_is_there(name, passes, tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{name}, 580.159'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if passes:
        assert compare._versions(Hardware.load("h200"))["driver"] == "580.159"
    else:
        with pytest.raises(InputError, match="this machine has NVIDIA B200"):
            compare._versions(Hardware.load("h200"))

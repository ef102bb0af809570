"""The machine's side for real, at tiny size: two engines in turn, deaths, hangs, a profile."""

from __future__ import annotations

import shutil

import pytest

from metainfer_lab.bench.timing import Sample
from metainfer_lab.bench.workload import Workload
from metainfer_lab.optimise import bench as ours
from metainfer_lab.optimise.bench import Broken, RealBench, four_runs
from metainfer_lab.optimise.profiling import BETWEEN
from metainfer_lab.paths import ENGINES
from metainfer_lab.spec import Spec

TINY = Spec.load("qwen3-tiny-cpu")
RIGHT = ENGINES / "qwen3-reference"
POINT = Workload(prompt_len=6, output_len=6)
STEP = "    def step(self)"


@pytest.fixture(scope="module")
def bench():
    return RealBench(TINY)


def spoilt(folder, line):
    """The right engine with one more line at the beginning of its step."""
    shutil.copytree(RIGHT, folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "engine.py"
    head, mark, rest = path.read_text().partition(STEP)
    signature, colon, body = rest.partition(":\n")
    assert mark and colon
    path.write_text(f"{head}{mark}{signature}{colon}        {line}\n{body}")
    return folder


def test_the_two_take_turns_and_the_one_at_rest_stands_still(monkeypatch):
    order, frozen = [], []

    def timed(engine, workload, batch):
        order.append(engine)
        tokens = [[1, 2]] if engine == "parent" else [[1, 3]]
        rate = 50.0 if engine == "parent" else 60.0
        return Sample(batch, tokens, 10.0, 20.0, rate, rate)

    monkeypatch.setattr(ours, "time_engine", timed)
    monkeypatch.setattr(ours, "while_frozen", lambda other, run: frozen.append(other) or run)
    engines = ["parent", "candidate"]
    block = four_runs(engines, "main", POINT, [[1]], swapped=False)
    four_runs(engines, "main", POINT, [[1]], swapped=True)
    assert order == [*engines, *engines[::-1], *engines[::-1], *engines]
    assert all(one != other for one, other in zip(order, frozen, strict=True))
    assert block.parent["decode_tok_s"] == (50, 50) and block.candidate["decode_tok_s"] == (60, 60)
    assert block.same_tokens == 0.5


def test_a_right_engine_beside_a_slow_one(bench, tmp_path):
    slow = spoilt(tmp_path / "engine", "import time; time.sleep(0.02)")
    bench.smoke(RIGHT)
    with bench.pairs(slow, RIGHT, "main", POINT) as pair:
        block = pair()
    assert block.gain("decode_tok_s") > 0.3 and block.gain("ttft_ms") > 0
    assert block.same_tokens == 1.0


@pytest.mark.parametrize(
    ("line", "status"), [("import os; os._exit(3)", "crash"), ("while True: pass", "timeout")]
)
def test_deaths_and_hangs_are_told_apart(bench, tmp_path, monkeypatch, line, status):
    monkeypatch.setattr("metainfer_lab.engine.session.DEFAULT_TIMEOUT_S", 12.0)
    with pytest.raises(Broken) as found:
        bench.smoke(spoilt(tmp_path / "engine", line))
    assert found.value.status == status


def test_a_profile_of_a_real_engine(bench):
    profile = bench.profile(RIGHT)
    names = [target.name for target in profile.targets]
    assert BETWEEN in names and len(names) > 5
    assert 0 < profile.floor_us < profile.step_us
    assert sum(target.us for target in profile.targets) <= 1.01 * profile.step_us


def test_an_engine_that_cannot_be_profiled_says_why_in_one_line(bench, tmp_path):
    liar = spoilt(tmp_path / "engine", "print('PROFILE {\"step_us\": 1}'); raise SystemExit(0)")
    with pytest.raises(RuntimeError, match="came to nothing") as found:
        bench.profile(liar)
    assert "\n" not in str(found.value)

"""Gates operators, drift and memory: a right engine passes, faults die in words; the formulas.

Slow: four verifications of a tiny engine.
"""

import random

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from metainfer_lab.checkpoints import nvfp4
from metainfer_lab.engine import host
from metainfer_lab.gates import verify
from metainfer_lab.gates.formulas import KNOWN, Draw, attention, dequantise_nvfp4, rms_norm, rope
from metainfer_lab.gates.launches import kernels, own, undeclared
from metainfer_lab.gates.memory import BATCH, CONTEXT, Predicted
from metainfer_lab.gates.mutants import catalogue
from metainfer_lab.gates.operators import BLOCKS, _sizes, rounded, row_error
from metainfer_lab.gates.trial import Trial
from metainfer_lab.model import ModelDims
from metainfer_lab.paths import ENGINES
from metainfer_lab.roofline import Deployment
from metainfer_lab.spec import Spec

REFERENCE = ENGINES / "qwen3-reference"
SPEC = Spec.load("qwen3-tiny-cpu")
KILLED = {
    "norm-counts-256-columns": ("operators", "rms_norm"),
    "kernel-of-its-own": ("operators", "narrow_kernel: is launched"),
    "window-of-256": ("drift", "300 steps of decode"),
    "keeps-finished-requests": ("memory", "more Python objects"),
}


@pytest.fixture(scope="module")
def rng() -> np.random.Generator:
    return np.random.default_rng(random.SystemRandom().getrandbits(32))


def test_a_right_engine_passes():
    verdict = verify(REFERENCE, spec=SPEC, gates=["operators", "drift", "memory"])
    assert verdict.passed, str(verdict)
    assert [gate.status for gate in verdict.gates] == ["pass"] * 3
    assert verdict.gates[0].cases >= 40 and verdict.gates[1].worst_error > 0


@pytest.mark.parametrize("name", KILLED)
def test_a_fault_dies_in_words(tmp_path, name):
    gate, words = KILLED[name]
    wrong = catalogue("mutants", "qwen3") + catalogue("fakes", "qwen3")
    mutant = next(one for one in wrong if one.name == name)
    verdict = verify(mutant.apply(tmp_path / "wrong"), spec=SPEC, gates=[gate])
    assert not verdict.passed and words in str(verdict), str(verdict)


def test_an_engine_without_pairs_is_not_judged_on_a_cpu(monkeypatch):
    monkeypatch.setattr(Trial, "real", lambda self: None)
    verdict = verify("smollm2-135m-fp32-cpu", gates=["operators", "parallel"])
    assert verdict.passed and {gate.status for gate in verdict.gates} == {"not_judged"}
    assert "OPERATORS" in verdict.gates[0].reason and "one rank" in verdict.gates[1].reason


CUDA = """extern "C" __global__ void __launch_bounds__(32 * (2 + 2)) fold(const float *x) {}
template <int N> __global__ void spare(float *x) {}
"""
PYTHON = """import triton
from . import naive
@triton.jit
def helper(x): return x
@triton.jit
def add_kernel(x): helper(x)
def total(x): add_kernel[(1,)](x)
def by_name(name): return lambda x: x.launch(name)
class Pair:
    def __init__(self, naive, kernel: "spare"): self.kernel = kernel
PAIRS = [naive.add, total]
OPERATORS = {"add": Pair(*PAIRS)}
def step(x, names=("fold",)): return x.launch(names[0])
"""


def test_kernels_without_a_pair_are_read_from_the_source(tmp_path):
    (tmp_path / "fold.cu").write_text(CUDA)
    (tmp_path / "__init__.py").write_text(PYTHON)
    assert kernels(tmp_path) == {"helper", "add_kernel", "fold", "spare"}
    assert undeclared(tmp_path) == ["fold"]  # nobody launches spare by this name
    declared = PYTHON + "OPERATORS |= {'fold': Pair(naive.fold, by_name('fold'))}\n"
    (tmp_path / "__init__.py").write_text(declared)
    assert not undeclared(tmp_path)
    (tmp_path / "__init__.py").write_text(PYTHON.replace("[naive.add, total]", "[]"))
    assert undeclared(tmp_path) == ["add_kernel", "fold"]
    seen = {"void spare<3>(float*)", "add_kernel", "made_at_run_time_4", "nvjet_sm90_tst_mma"}
    seen |= {"void at::native::vectorized_elementwise_kernel<4>(int)", "Memcpy DtoD (Device)"}
    assert own(seen, tmp_path) == {"spare", "add_kernel", "made_at_run_time_4"}


def test_formulas_are_those_of_torch(rng):
    draw = Draw(rng, rows=7, context=int(rng.integers(1, 40)), granules={})
    tensors, _ = KNOWN["attention"].inputs(draw)
    q, k, v = (torch.from_numpy(tensors[name]).transpose(0, 1)[None] for name in "qkv")
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    want = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    assert row_error(attention(**tensors)[0], want[0].transpose(0, 1).numpy()) < 1e-13

    arrays, scalars = KNOWN["rms_norm"].inputs(draw)
    x, weight = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["weight"])
    want = functional.rms_norm(x, weight.shape, weight, **scalars).numpy()
    assert row_error(rms_norm(**arrays, **scalars)[0], want) < 1e-13

    arrays, _ = KNOWN["causal_conv"].inputs(draw)
    history = torch.from_numpy(np.concatenate([arrays["tail"], arrays["x"]])).T[None]
    weight = torch.from_numpy(arrays["weight"])[:, None]
    want = functional.silu(functional.conv1d(history, weight, groups=len(weight)))[0].T.numpy()
    assert row_error(KNOWN["causal_conv"].formula(**arrays)[0], want) < 1e-13


def test_rope_turns_half_split_pairs_and_leaves_the_rest():
    x = np.arange(1.0, 7)[None, None]
    got = rope(x, np.array([[np.pi / 2, 0.0]]))[0]
    assert np.allclose(got, [[[-3, 2, 1, 4, 5, 6]]])


def test_codes_are_those_of_the_quantiser(rng):
    weight = torch.from_numpy(rng.standard_normal((6, 64))).float()
    four = nvfp4.quantise(weight)
    arrays = (four.codes.numpy(), four.block_scale.view(torch.uint8).numpy())
    scale = four.global_scale.double().numpy()
    got = dequantise_nvfp4(*arrays, scale, "float64")[0]
    assert np.array_equal(got, four.dequantise().numpy())


def test_rounding_to_bfloat16_is_torchs(rng):
    x = rng.standard_normal(4000) * 10.0 ** rng.integers(-20, 20, 4000)
    want = torch.from_numpy(x).float().bfloat16().double().numpy()
    assert np.array_equal(rounded(x, "bfloat16"), want)


def test_sizes_lie_in_range_and_at_edges(rng):
    for rows in (range(1, 33), range(64, 1025, 64), range(1, 2), range(1, 600)):
        sizes = [pair for _ in range(20) for pair in _sizes(rng, rows, 8)]
        assert {row for row, _ in sizes} <= set(rows)
        assert {rows[0], rows[-1]} <= {row for row, _ in sizes}
    edges = {block + step for block in BLOCKS[:-1] for step in (-1, 0, 1)}
    assert len(edges & {row for row, _ in sizes}) > 5


def test_a_row_is_measured_by_its_length(rng):
    want = rng.standard_normal((5, 40))
    got = want.copy()
    got[3] *= 1 + 1e-4
    assert row_error(got, want) == pytest.approx(1e-4)
    want[1, 2] = np.nan  # was not to be written
    assert np.isnan(row_error(got, want))
    got[1, 2] = np.nan
    assert row_error(got, want) == pytest.approx(1e-4)
    got[0, 0] = np.nan
    assert np.isnan(row_error(got, want))


def test_half_a_cache_and_a_doubled_one_are_outside_of_what_is_predicted():
    dims = ModelDims.load("qwen3-tiny")
    predicted = Predicted(Deployment(dims, {}, "fp32", "fp32", "fp32", 1))
    exact = BATCH * CONTEXT * predicted.deployment.kv_bytes_per_token()
    assert predicted.least(BATCH, CONTEXT) == exact > exact // 2
    assert exact <= predicted.most(BATCH, CONTEXT) < 2 * exact


def test_what_ran_is_read_from_the_profilers_raw_events():
    with profile(activities=[ProfilerActivity.CPU]) as watch:
        torch.ones(3).cumsum(0)
    assert "aten::cumsum" in host.ran(watch, "CPU")
    assert host.ran(watch, "CUDA") == []

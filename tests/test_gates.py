"""The gates themselves: right engines pass, wrong ones fail with words, records are records.

Slow: each verification starts an oracle and several candidates (4 to 8 s each on a free machine).
"""

import json
import math
import shutil

import numpy as np
import pytest

from metainfer_lab.errors import InputError
from metainfer_lab.gates import GATES, Failure, Verdict, verify
from metainfer_lab.gates.alone import complaints
from metainfer_lab.gates.compare import Truth, compare_logits, kl_divergence
from metainfer_lab.gates.sampling import chi_square, probabilities
from metainfer_lab.gates.tolerances import CALIBRATED, calibrated, fixed
from metainfer_lab.gates.trial import Trial
from metainfer_lab.gates.verdict import Findings
from metainfer_lab.paths import ENGINES
from metainfer_lab.spec import Spec

REFERENCE = ENGINES / "qwen3-reference"


@pytest.fixture
def spec(monkeypatch) -> Spec:
    """Tiny checkpoints alone: the real weights have their own place in the audit."""
    monkeypatch.setattr(Trial, "real", lambda self: None)
    return Spec.load("qwen3-tiny-cpu")


def test_a_right_engine_passes(spec):
    """Slow. Some gates on fresh inputs; tests/test_audit.py has wrong engines."""
    seen = []
    verdict = verify(REFERENCE, spec=spec, gates=["alone", "logits", "limits"], on_gate=seen.append)
    assert verdict.passed, str(verdict)
    assert [gate.gate for gate in seen] == ["alone", "logits", "limits"]
    assert all(gate.cases > 5 for gate in seen)
    again = Verdict.model_validate_json(verdict.model_dump_json())
    assert again == verdict and again.hash == verdict.hash


def test_gates_asked_at_once_give_one_verdict_in_the_order_of_gates():
    """Slow. Processes of their own: what a fixture patches is not patched there."""
    seen = []
    asked = {"gates": ["parallel", "limits", "speed"], "on_gate": seen.append}
    verdict = verify(REFERENCE, spec=Spec.load("qwen3-tiny-cpu"), jobs=2, **asked)
    assert [gate.gate for gate in verdict.gates] == ["limits", "parallel", "speed"]
    assert [gate.status for gate in verdict.gates] == ["pass", "pass", "not_judged"]
    assert verdict.passed and verdict.sandbox != "none" and len(seen) == 3


def test_no_manifest_is_the_engines_failure_and_a_wrong_gate_the_callers(tmp_path, spec):
    folder = tmp_path / "engine"
    shutil.copytree(REFERENCE, folder)
    (folder / "engine.json").unlink()
    verdict = verify(folder, spec=spec, gates=["alone"])
    assert not verdict.passed and "engine.json" in verdict.failures[0].detail
    with pytest.raises(InputError, match=r"speling.*known are alone"):
        verify(REFERENCE, spec=spec, gates=["speling"])


def test_nan_is_beyond_every_tolerance():
    findings = Findings()
    findings.case()
    assert not findings.measure("x", math.nan, 1e9)
    verdict = findings.verdict("logits", 1, 0.0)
    assert verdict.status == "fail" and math.isnan(verdict.failures[0].error)
    assert "NaN" in verdict.model_dump_json()
    assert Findings().verdict("logits", 1, 0.0).status == "fail", "nothing was asked"


def rows(n: int = 40, v: int = 50) -> np.ndarray:
    return np.random.default_rng().standard_normal((n, v))


def row_7(x: np.ndarray) -> np.ndarray:
    return (np.arange(len(x)) == 7)[:, None]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda x: x.astype(np.float64), "not float32"),
        (lambda x: x[:-1], "not float32"),
        (lambda x: np.where(row_7(x), np.float32(np.nan), x), "not finite"),
        (lambda x: np.where(row_7(x), x + np.float32(1e-3), x), "position 7"),
        (lambda x: x * np.float32(1 + 1.5e-5), "95th percentile"),
    ],
)
def test_compare_logits(spoil, words):
    want = rows()
    truth = Truth(want, fixed("fp32", "tiny", len(want)))
    right, findings = want.astype(np.float32), Findings()
    assert compare_logits(findings, "case", right, truth, range(len(want)))
    assert not findings.failures
    assert not compare_logits(findings, "case", spoil(right), truth, range(len(want)))
    assert words in str(findings.failures[0])


def test_calibrated_allowances_follow_the_noise():
    """Noise like the reference's passes; twice that at every row does not."""
    want = rows()
    spread = 0.01 * np.linalg.norm(want, axis=1, keepdims=True) / np.sqrt(want.shape[1])
    noise = [spread * rows() for _ in range(2)]
    error = np.linalg.norm(noise[0], axis=1) / np.linalg.norm(want, axis=1)
    kl = kl_divergence(want + noise[0], want)
    truth = Truth(want, calibrated(CALIBRATED["int8_dynamic"], error, kl, error))
    for factor, passes in ((1.0, True), (2.0, False)):
        got = (want + factor * noise[1]).astype(np.float32)
        assert compare_logits(Findings(), "case", got, truth, range(len(want))) == passes


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import vllm", "vllm"),
        ("from transformers import AutoModel", "transformers"),
        ("import socket", "socket"),
        ("def f():\n    import urllib.request", "urllib"),
        ("exec('1')", "exec"),
        ("import os\nos._exit(0)", "os._exit"),
        ("import time\ntime.perf_counter = None", "clock"),
        ("x = '" + "a" * 20_000 + "'", "literal"),
        ("x = (", "parse"),
    ],
)
def test_complaints_about_source(source, words):
    assert any(words in complaint for _, complaint in complaints(source))


def test_no_complaints_about_plain_source():
    source = "import math\nimport torch\nfrom . import model\nfrom .model import Model\nmath.pi"
    assert not list(complaints(source))


def test_chi_square_and_probabilities():
    rng = np.random.default_rng()
    p = np.exp(rng.standard_normal(30))
    p /= p.sum()
    drawn = np.bincount(rng.choice(30, 4000, p=p), minlength=30)
    assert chi_square(drawn, 4000 * p) > 1e-6
    assert chi_square(np.roll(drawn, 1), 4000 * p) < 1e-6
    common, rare = np.full(12, 0.083), 0.004  # of 600 draws 2.4 expected
    for count, beyond in ((34, True), (5, False)):
        seen = np.append(np.full(12, 50) - np.arange(12) % 3, count)
        assert (chi_square(seen, 600 * np.append(common, rare)) < 1e-6) == beyond
    logits = np.log(p)
    for params, kept in (({"top_k": 4}, 4), ({"top_p": 1e-9}, 1), ({"min_p": 1.0}, 1)):
        found = probabilities(logits, {"temperature": 1.0} | params, [])
        assert (found > 0).sum() == kept and found.sum() == pytest.approx(1)
    reached = probabilities(logits, {"temperature": 1.0, "top_p": 0.6}, [])
    ranked = np.sort(p)[::-1]
    assert (reached > 0).sum() == np.searchsorted(ranked.cumsum(), 0.6) + 1


def test_a_failure_speaks():
    failure = Failure(
        case="prompt of 5", position=3, error=0.25, tolerance=1e-5, layer="layer 1 MLP", detail="L2"
    )
    text = str(failure)
    for words in ("prompt of 5", "position 3", "0.25", "1e-05", "layer 1 MLP", "L2"):
        assert words in text
    assert json.loads(failure.model_dump_json())["position"] == 3
    assert {"alone", "weights", "logits", "decode", "batching", "limits"} <= set(GATES)

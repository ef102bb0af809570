"""The host process: calls go through, errors keep their name, death and silence are told."""

import os
import shutil
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from metainfer_lab.checkpoints.tiny import tiny_checkpoint
from metainfer_lab.engine import (
    EngineDied,
    EngineError,
    EngineManifest,
    EngineProcess,
    find_engine,
    is_recorded,
)
from metainfer_lab.engine.session import Engine as OpenedEngine
from metainfer_lab.errors import InputError
from metainfer_lab.paths import ENGINES
from metainfer_lab.spec import Spec

REFERENCE = ENGINES / "qwen3-reference"
DIMS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
STUB = """
import os, sys, time
import numpy as np
class Engine:
    def score(self, tokens, positions, **more):
        {score}
    def submit(self, tokens, params): return 0
    def step(self): time.sleep(0.01); return []
    def close(self): pass
def load(*args, **more): return Engine()
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny_checkpoint("qwen3", 5, tmp_path_factory.mktemp("engine") / "c", **DIMS)


@pytest.fixture(scope="module")
def engine(checkpoint):
    with EngineProcess(REFERENCE, checkpoint, max_context=128, max_batch=3, threads=1) as process:
        yield process


def stub(folder: Path, score: str) -> Path:
    folder.mkdir()
    (folder / "__init__.py").write_text(STUB.format(score=score))
    return folder


def test_score_submit_step_cancel_stats(engine):
    logits = engine.score([1, 2, 3], [2, 0])
    assert logits.shape == (2, 96) and logits.dtype == np.float32
    first = engine.submit([1, 2, 3], {"max_new_tokens": 3, "ignore_eos": True, "logprobs": 2})
    second = engine.submit([4], {"max_new_tokens": 50, "ignore_eos": True})
    results = engine.step()
    assert {r.request for r in results} == {first, second}
    begun = next(r for r in results if r.request == first)
    assert begun.token == int(logits[0].argmax()) and len(begun.top_logprobs) == 2
    engine.cancel(second)
    rest = engine.finish()
    assert [r.finish_reason for r in rest] == [None, "length"]
    assert {r.request for r in rest} == {first}
    assert engine.stats()["cache_bytes_used"] == 0


def test_a_loop_over_arrivals_may_be_left(engine):
    request = engine.submit([1], {"max_new_tokens": 100, "ignore_eos": True})
    for arrival in engine.run():
        assert arrival.seconds <= time.perf_counter()
        break
    engine.cancel(request)
    assert engine.stats()["running"] == 0


def test_requests_join_a_running_loop(engine):
    """Submitted from inside the loop, one of them when the host may have come to rest."""
    params = {"max_new_tokens": 4, "ignore_eos": True}
    ids, seen = [engine.submit([1], params)], []
    for arrival in engine.run():
        seen += arrival.results
        if len(ids) < 3 and arrival.results[-1].finish_reason:
            ids.append(engine.submit([2, 3], params))
    assert [r.request for r in seen] == [i for i in ids for _ in range(4)]
    assert engine.stats()["running"] == 0


def test_an_error_in_the_loop_leaves_a_host_that_answers(tmp_path):
    folder = stub(tmp_path / "fails", "return np.zeros((1, 4), np.float32)")
    text = (folder / "__init__.py").read_text().replace("time.sleep(0.01); return []", "1 / 0")
    (folder / "__init__.py").write_text(text)
    with EngineProcess(folder, tmp_path) as process:
        process.submit([1])
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            process.finish()
        assert process.score([1], [0]).shape == (1, 4)


def test_an_engines_value_error_keeps_its_name(engine):
    with pytest.raises(EngineError, match="temperature") as caught:
        engine.submit([1], {"temperature": -1})
    assert caught.value.type == "ValueError"


def test_the_host_has_no_package_but_the_allowed(engine):
    assert not {"transformers", "metainfer_lab", "pydantic"} & set(engine.surroundings().modules)


@pytest.mark.parametrize("level", ["bubblewrap", "landlock"])
def test_a_death_is_named_with_its_last_words(tmp_path, level):
    code = "print('no memory for this', file=sys.stderr, flush=True); os._exit(0)"
    folder = stub(tmp_path / "dies", code)
    raises = pytest.raises(EngineDied, match=r"dies: .*ended.*no memory for this")
    with raises, EngineProcess(folder, tmp_path, sandbox=level) as process:
        process.score([1], [0])


def test_silence_is_a_death_and_nothing_stays(tmp_path):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    folder = stub(tmp_path / "hangs", "time.sleep(60)")
    raises = pytest.raises(EngineDied, match=r"no answer in 1 s")
    with raises, EngineProcess(folder, tmp_path, timeout_s=1) as process:
        process.score([1], [0])
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after <= before


def test_leaving_quietly_is_an_error(tmp_path):
    folder = stub(tmp_path / "leaves", "raise SystemExit(0)")
    raises = pytest.raises(EngineError, match=r"SystemExit")
    with raises, EngineProcess(folder, tmp_path) as process:
        process.score([1], [0])


def test_what_an_engine_prints_is_no_answer(tmp_path):
    code = "print('{\"logits\": 1}'); return np.zeros((1, 4), np.float32)"
    with EngineProcess(stub(tmp_path / "talks", code), tmp_path) as process:
        assert process.score([1], [0]).shape == (1, 4)


def test_an_interrupt_in_the_middle_leaves_no_process(tmp_path):
    folder = stub(tmp_path / "slow", "time.sleep(30)")
    pids = []
    with pytest.raises(KeyboardInterrupt), EngineProcess(folder, tmp_path) as process:
        pids.append(process.confined.process.pid)
        raise KeyboardInterrupt
    assert not psutil.pid_exists(pids[0])


def test_find_engine_and_manifest(tmp_path):
    """The folder named like the spec comes before others that list it."""
    assert find_engine("qwen3-tiny-cpu") == ENGINES / "qwen3-tiny-cpu"
    assert find_engine("qwen3-8b-bf16-tp4-h200") == ENGINES / "qwen3-8b-bf16-tp-h200"
    with pytest.raises(InputError, match="no-such-spec"):
        find_engine("no-such-spec")
    with pytest.raises(InputError, match=r"engine\.json"):
        EngineManifest.read(tmp_path)
    (tmp_path / "engine.json").write_text('{"interface": 2, "specs": []}')
    with pytest.raises(InputError, match=r"interface.*specs"):
        EngineManifest.read(tmp_path)


def test_the_reference_is_the_recorded_one(tmp_path):
    """data/engines/trees.json has its hash; a copy elsewhere is not trusted."""
    assert is_recorded(REFERENCE)
    shutil.copytree(REFERENCE, tmp_path / "qwen3-reference")
    assert not is_recorded(tmp_path / "qwen3-reference")


def test_this_process_keeps_its_files(engine):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with pytest.raises(InputError), EngineProcess(REFERENCE, None, sandbox="jail"):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_engine_opens_under_the_spec_asked_for():
    """By its id as by its folder: it serves several."""
    wanted = Spec.load("qwen3-8b-bf16-h200-c32")
    for source in ("qwen3-8b-bf16-h200", ENGINES / "qwen3-8b-bf16-h200"):
        engine = OpenedEngine.open(source, spec=wanted)
        assert (engine.spec, engine.folder.name) == (wanted, "qwen3-8b-bf16-h200")

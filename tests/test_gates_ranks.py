"""Several ranks of one engine: the host's side with stubs on each rung, and gate parallel.

Slow: the gate starts seven ranks; a stub of two ranks about two seconds.
"""

import time
from pathlib import Path

import pytest

from metainfer_lab.engine import Engine, EngineDied, EngineError, EngineProcess
from metainfer_lab.gates import verify
from metainfer_lab.gates.mutants import catalogue
from metainfer_lab.paths import ENGINES
from metainfer_lab.sandbox import rungs
from metainfer_lab.spec import Spec

RUNGS = [level for level in ("bubblewrap", "landlock") if not rungs.leaks(level)]
SPEC = Spec.load("qwen3-tiny-cpu")
STUB = """
import os
import time
class Engine:
    def __init__(self, rank, world): self.rank, self.calls = rank, []
    def submit(self, tokens, params): self.calls.append("submit"); return len(self.calls)
    def step(self):
        self.calls.append("step")
{step}
        return []
    def stats(self): return {{{stats}}}
    def close(self): pass
def load(checkpoint, *, rank, world, **settings): return Engine(rank, world)
"""


def stub(folder: Path, *, stats: str = "'calls': list(self.calls)", step: str = "pass") -> Path:
    folder.mkdir()
    (folder / "__init__.py").write_text(STUB.format(stats=stats, step=f"        {step}"))
    return folder


@pytest.mark.parametrize("level", RUNGS)
def test_ranks_make_the_same_calls_and_find_each_other_in_the_environment(tmp_path, level):
    seen = "*sorted(os.environ.keys() & {'RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'})"
    stats = f"'calls': list(self.calls), 'names': [{seen}], 'world': os.environ['WORLD_SIZE']"
    folder = stub(tmp_path / "engine", stats=stats)
    with EngineProcess(folder, folder, world=3, sandbox=level) as process:
        assert process.sockets == (level == "landlock")
        process.submit([1], {})
        process.step()
        process.submit([1], {})
        found = process.stats()
        assert len({process.rank(rank).pid for rank in range(3)}) == 3
    assert found["calls"] == ["submit", "step", "submit"] and found["world"] == "3"
    assert found["names"] == ["MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"]


def test_ranks_that_differ_are_an_error(tmp_path):
    folder = stub(tmp_path / "engine", stats="'running': self.rank")
    raises = pytest.raises(EngineError, match=r"RanksDisagree: stats: rank 1 .*'running': 1")
    with EngineProcess(folder, folder, world=2) as process, raises:
        process.stats()


def test_a_rank_that_leaves_is_named_and_takes_all_with_it(tmp_path):
    step = "os._exit(4) if self.rank else time.sleep(60)"
    folder = stub(tmp_path / "engine", step=step)
    with EngineProcess(folder, folder, world=2) as process:
        first = process.rank(0)
        started = time.monotonic()
        with pytest.raises(EngineDied, match=r"rank 1 of 2 was lost \(exit code 4\)"):
            process.step()
        assert time.monotonic() - started < 15
        assert not first.is_running()


def test_an_error_of_one_rank_alone_is_told(tmp_path):
    folder = stub(tmp_path / "engine", stats="'x': 1 // (1 - self.rank)")
    raises = pytest.raises(EngineError, match=r"rank 1 answered .*ZeroDivisionError")
    with EngineProcess(folder, folder, world=2) as process, raises:
        process.stats()


def test_the_plain_engine_is_right_on_several_ranks():
    verdict = verify(ENGINES / "qwen3-reference", spec=SPEC, gates=["parallel"])
    assert verdict.passed and verdict.gates[0].status == "pass", str(verdict)
    assert verdict.gates[0].cases > 15


def test_a_spec_with_ranks_opens_as_many():
    prompt, several = [3, 1, 4], SPEC.change(parallel__tp=2)
    texts = []
    for spec in (SPEC, several):
        with Engine.open(ENGINES / "qwen3-reference", spec) as engine:
            texts.append(engine.generate(prompt, max_new_tokens=8, ignore_eos=True))
            world = engine.process.world
    assert texts[0] == texts[1] and len(texts[0]) == 8 and world == 2


def test_waiting_for_a_lost_rank_is_a_failure(tmp_path):
    wrong = {mutant.name: mutant for mutant in catalogue("mutants", "qwen3")}
    folder = wrong["waits-for-a-lost-rank"].apply(tmp_path / "wrong")
    verdict = verify(folder, spec=SPEC, gates=["parallel"])
    assert not verdict.passed and "it had to be ended" in str(verdict), str(verdict)

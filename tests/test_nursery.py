"""The nursery: forked hosts keep what a host of one's own promises, on each rung of the sandbox."""

import contextlib
import os
import time
from pathlib import Path

import psutil
import pytest

from metainfer_lab.engine import EngineDied, EngineProcess, Nursery
from metainfer_lab.sandbox import rungs

RUNGS = [level for level in ("bubblewrap", "landlock") if not rungs.leaks(level)]
ENGINE = """
import os, signal, subprocess, sys, tempfile
class Engine:
    def stats(self):
{stats}
    def close(self): pass
def load(*args, **more): return Engine()
"""


def engine(folder: Path, stats: str) -> Path:
    folder.mkdir(exist_ok=True)
    lines = "".join(f"        {line}\n" for line in stats.splitlines())
    (folder / "__init__.py").write_text(ENGINE.format(stats=lines))
    return folder


@pytest.fixture(params=[*RUNGS, "none"])
def nursery(request, tmp_path):
    (tmp_path / "engine").mkdir()
    with Nursery(request.param, [tmp_path / "engine"], threads=1) as started:
        yield started


def stats(nursery: Nursery, folder: Path) -> dict:
    with EngineProcess(folder, folder, nursery=nursery) as process:
        assert process.level == nursery.level
        return process.stats()


def test_a_host_knows_nothing_of_the_one_before(nursery, tmp_path):
    code = """
seen = {"left": sorted(os.listdir(tempfile.gettempdir())), "global": hasattr(os, "left")}
open(tempfile.gettempdir() + "/left", "w").close()
os.left = True
return seen | {"torch": "torch" in sys.modules, "pid": os.getpid()}
"""
    folder = engine(tmp_path / "engine", code)
    first, second = stats(nursery, folder), stats(nursery, folder)
    assert first["pid"] != second["pid"]
    for seen in (first, second):
        assert seen["torch"] and not seen["left"] and not seen["global"]


def test_what_a_host_started_ends_with_it(nursery, tmp_path):
    mark = f"4{os.getpid()}"
    code = f"subprocess.Popen(['sleep', '{mark}'], start_new_session=True)\nreturn {{}}"
    stats(nursery, engine(tmp_path / "engine", code))
    deadline = time.monotonic() + 2
    while any(mark in (p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < deadline, "a helper process outlived its engine"


def test_death_is_told_with_the_last_words_and_the_next_host_lives(nursery, tmp_path):
    folder = engine(tmp_path / "engine", "print('farewell', flush=True)\nos._exit(3)")
    with pytest.raises(EngineDied, match="farewell"):
        stats(nursery, folder)
    folder = engine(folder, "os.kill(os.getppid(), signal.SIGKILL)\nreturn {}")
    with contextlib.suppress(EngineDied):  # on the Landlock rung it dies with its parent
        stats(nursery, folder)
    assert stats(nursery, engine(folder, "return {'alive': True}")) == {"alive": True}


@pytest.mark.parametrize("nursery", RUNGS, indirect=True)
def test_a_host_cannot_look_into_the_nursery(nursery, tmp_path):
    code = """
try:
    with open(f"/proc/{os.getppid()}/mem", "rb") as memory:
        return {"read": True}
except OSError:
    return {"read": False}
"""
    assert stats(nursery, engine(tmp_path / "engine", code)) == {"read": False}

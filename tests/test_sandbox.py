"""The sandbox: each rung's properties, by trying to break them; what happens when none works."""

import os
import socket
import time
from pathlib import Path

import pytest

from metainfer_lab import sandbox
from metainfer_lab.errors import InputError
from metainfer_lab.sandbox import rungs
from metainfer_lab.sandbox.packages import site_folders, without

RUNGS = [level for level in ("bubblewrap", "landlock") if not rungs.leaks(level)]


def python(code: str, cwd: Path, level: str, **more) -> sandbox.Completed:
    return sandbox.run(["python", "-c", code], cwd, sandbox=level, **more)


def test_some_rung_works_here_and_none_is_seen_to_leak():
    assert RUNGS
    assert {"reads a foreign file", "reaches the network"} <= set(rungs.leaks("none"))


@pytest.mark.parametrize("level", RUNGS)
def test_files(tmp_path, level):
    secret, shown, own = (tmp_path / name for name in ("secret", "shown", "own"))
    for folder in (secret, shown, own):
        folder.mkdir()
        (folder / "file").write_text("text")
    code = f"""
import os
def tries(action):
    try:
        return bool(action())
    except OSError:
        return False
print([
    tries(lambda: open(r"{secret}/file").read()),
    tries(lambda: open(r"{shown}/file").read()),
    tries(lambda: open(r"{shown}/new", "w")),
    tries(lambda: open(r"{own}/new", "w")),
    tries(lambda: open(os.environ["TMPDIR"] + "/new", "w")),
    tries(lambda: os.listdir(r"{Path.home()}") and open(r"{Path.home()}/.profile").read()),
])
"""
    done = python(code, shown, level, writable=[own])
    assert done.stdout.strip() == "[False, True, False, True, True, False]", done


@pytest.mark.parametrize("level", RUNGS)
def test_the_environment_is_a_list_of_ours(tmp_path, monkeypatch, level):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "secret")
    done = python("import os; print(dict(os.environ))", tmp_path, level)
    seen = eval(done.stdout)
    assert "ANTHROPIC_API_KEY" not in seen
    assert seen["HOME"] != str(Path.home())
    assert seen["NCCL_NVLS_ENABLE"] == "0"
    assert seen["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert seen["NVSHMEM_DISABLE_NVLS"] == "1"


@pytest.mark.parametrize("level", RUNGS)
def test_the_network_is_out_of_reach_unless_asked_for(tmp_path, level):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        assert python(code, tmp_path, level).rc != 0
        assert python(code, tmp_path, level, network=True).rc == 0


@pytest.mark.parametrize("level", RUNGS)
def test_only_allowed_packages_can_be_imported(tmp_path, level):
    path = next(f for f in site_folders() if (f / "transformers").is_dir())
    code = f"""
import sys, numpy, safetensors
for name in ("transformers", "metainfer_lab", "pydantic"):
    sys.path.append(r"{path}")
    try:
        __import__(name)
        print("imported", name)
    except (ImportError, OSError):
        pass
"""
    done = python(code, tmp_path, level)
    assert (done.rc, done.stdout) == (0, ""), done


@pytest.mark.parametrize("level", [*RUNGS, "none"])
def test_a_command_that_hangs_is_ended_with_all_that_it_started(tmp_path, level):
    """Daemons too, where the rung can: a process group is all that "none" has."""
    mark = f"sleep 3{os.getpid()}.{level == 'landlock':d}"
    detached = "" if level == "none" else "setsid "
    argv = ["bash", "-c", f"{detached}{mark} & {mark}"]
    started = time.monotonic()
    done = sandbox.run(argv, tmp_path, timeout_s=1, sandbox=level)
    assert done.timed_out and time.monotonic() - started < 8
    assert not [line for line in _commands() if mark.encode() in line.replace(b"\0", b" ")]


def _commands() -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return found


def test_output_is_bounded(tmp_path):
    done = sandbox.run(["bash", "-c", "yes | head -c 3000000; echo end"], tmp_path)
    assert len(done.stdout) < 3 * sandbox.KEPT_OUTPUT
    assert done.stdout.rstrip().endswith("end") and "left out" in done.stdout


def test_the_ladder(monkeypatch):
    broken: dict[str, tuple[str, ...]] = {"bubblewrap": ("no user namespaces",), "landlock": ()}
    monkeypatch.setattr(rungs, "leaks", lambda level: broken[level])
    assert rungs.choose() == "landlock"
    broken["landlock"] = ("too old a kernel",)
    with pytest.raises(InputError, match=r"no user namespaces.*too old"):
        rungs.choose()
    with pytest.warns(UserWarning, match="running recorded code"):
        assert rungs.choose(trusted=True) == "none"
    assert rungs.choose("none") == "none"
    with pytest.raises(InputError, match="bubblewrap"):
        rungs.choose("bubblewrap", trusted=True)
    with pytest.raises(InputError, match="'jail'"):
        rungs.choose("jail")


def test_without_covers_all_but_what_is_excluded(tmp_path):
    for name in ("a/x", "a/hidden/y", "b"):
        (tmp_path / name).mkdir(parents=True)
    covered = without(tmp_path, [tmp_path / "a" / "hidden"])
    assert covered == [tmp_path / "a" / "x", tmp_path / "b"]
    assert without(tmp_path, [tmp_path]) == []

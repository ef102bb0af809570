"""The sandbox: each rung's properties, by trying to break them; what happens when none works."""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from metainfer_lab import sandbox
from metainfer_lab.errors import InputError
from metainfer_lab.sandbox import rungs
from metainfer_lab.sandbox.packages import site_folders, without

PACKAGE = Path(sandbox.__file__).parents[1]
RUNGS = [level for level in ("bubblewrap", "landlock") if not rungs.leaks(level)]


def python(code: str, cwd: Path, level: str, **more) -> sandbox.Completed:
    return sandbox.run(["python", "-c", code], cwd, sandbox=level, **more)


def test_some_rung_works_here_and_none_is_seen_to_leak():
    assert RUNGS
    seen = {"reads a foreign file", "reaches the network", "reaches a local socket"}
    assert seen <= set(rungs.leaks("none"))


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
    monkeypatch.setenv("OMP_NUM_THREADS", "97")
    done = python("import os; print(dict(os.environ))", tmp_path, level)
    seen = eval(done.stdout)
    assert seen["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))  # as the rivals, always
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
def test_other_processes_are_out_of_reach(tmp_path, level):
    """Neither signals, nor memory, nor environment, nor an abstract socket of theirs."""
    name = f"metainfer-{secrets.token_hex(4)}"
    with socket.socket(socket.AF_UNIX) as server, subprocess.Popen(["sleep", "60"]) as other:
        server.bind(f"\0{name}")
        server.listen()
        code = f"""
import ctypes, os, signal, socket
libc, pid = ctypes.CDLL(None, use_errno=True), {other.pid}
buffer = ctypes.create_string_buffer(8)
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
here, there = Part(ctypes.addressof(buffer), 8), Part(0x400000, 8)
parts = ctypes.byref(here), 1, ctypes.byref(there), 1, 0
def tries(action):
    try:
        action()
        return True
    except OSError:
        return False
def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno())
print([
    tries(lambda: os.kill(pid, signal.SIGUSR1)),
    tries(lambda: checked(libc.ptrace(16, pid, 0, 0))),
    tries(lambda: checked(libc.process_vm_readv(pid, *parts))),
    tries(lambda: open(f"/proc/{{pid}}/environ").read()),
    tries(lambda: open(f"/proc/{{pid}}/mem", "rb")),
    tries(lambda: socket.socket(socket.AF_UNIX).connect("\\0{name}")),
])
"""
        done = python(code, tmp_path, level)
        alive = other.poll() is None
        other.kill()
    assert done.stdout.strip() == str([False] * 6) and alive, done


@pytest.mark.skipif("landlock" not in RUNGS, reason="no Landlock here")
def test_beside_a_gpu_local_sockets_may_listen_and_lead_nowhere(tmp_path, monkeypatch):
    """CUDA wants one; Landlock does not keep anyone from a socket that is a file."""
    monkeypatch.setattr(rungs, "devices", lambda: [Path("/dev/null")])
    server, datagrams = (str(tmp_path / name) for name in ("server", "datagrams"))
    code = f"""
import os, socket
own = os.environ["TMPDIR"] + "/own"
def tries(action):
    try:
        action()
        return True
    except OSError:
        return False
def made(kind):
    return socket.socket(socket.AF_UNIX, kind)
def listens():
    one = made(socket.SOCK_SEQPACKET)
    one.bind(own)
    one.listen()
print([tries(action) for action in (
    listens,
    lambda: made(socket.SOCK_SEQPACKET).bind("\\0metainfer"),
    lambda: made(socket.SOCK_STREAM).connect({server!r}),
    lambda: made(socket.SOCK_STREAM).sendto(b"x", {server!r}),
    lambda: made(socket.SOCK_SEQPACKET).sendto(b"x", {server!r}),
    lambda: made(socket.SOCK_DGRAM).sendto(b"x", {datagrams!r}),
    lambda: made(socket.SOCK_RAW).sendto(b"x", {datagrams!r}),
    lambda: socket.socket(socket.AF_INET),
)])
"""
    with (
        socket.socket(socket.AF_UNIX) as one,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as two,
    ):
        one.bind(server)
        one.listen()
        two.bind(datagrams)
        done = python(code, tmp_path, "landlock")
        two.setblocking(False)
        with pytest.raises(BlockingIOError):
            two.recv(1)
    assert done.stdout.strip() == str([True, True] + [False] * 6), done


@pytest.mark.parametrize("level", RUNGS)
def test_temporary_files_and_compile_caches_are_private_and_gone_afterwards(tmp_path, level):
    mark = f"metainfer-test-{secrets.token_hex(4)}"
    foreign = Path(tempfile.gettempdir()) / mark
    foreign.write_text("secret")
    code = f"""
import json, os, tempfile
from pathlib import Path
seen = []
for folder in ("/tmp", "/var/tmp", "/dev/shm"):
    try:
        seen += [Path(folder, "{mark}").exists() and Path(folder, "{mark}").read_text()]
        Path(folder, "{mark}-left").write_text("left")
    except OSError:
        pass
ends = ("CACHE_DIR", "CACHE_HOME", "EXTENSIONS_DIR")
caches = [value for name, value in os.environ.items() if name.endswith(ends)]
Path(tempfile.gettempdir(), "own").write_text("own")
print(json.dumps([seen, caches, tempfile.gettempdir(), os.environ["HOME"]]))
"""
    try:
        done = python(code, tmp_path, level)
    finally:
        foreign.unlink()
    seen, caches, scratch, home = json.loads(done.stdout)
    assert "secret" not in seen and home == scratch
    assert len(caches) == 4 and all(path.startswith(scratch) for path in caches)
    assert not Path(scratch).exists()
    left = [Path(folder, f"{mark}-left") for folder in ("/tmp", "/var/tmp", "/dev/shm")]
    assert not [path for path in left if path.exists()]


@pytest.mark.parametrize("level", RUNGS)
def test_a_compile_cache_can_be_handed_on_to_the_next_and_to_nobody_else(tmp_path, level):
    shared = tmp_path / "compiled"
    shared.mkdir()
    code = """
import os
from pathlib import Path
folder = Path(os.environ["TRITON_CACHE_DIR"])
folder.mkdir(exist_ok=True)
print([path.name for path in folder.iterdir()])
(folder / "kernel").touch()
"""
    seen = []
    for compiled in (shared, shared, None):
        argv = ["python", "-c", code]
        with sandbox.Confined(argv, level=level, compiled=compiled) as confined:
            assert confined.process.wait(30) == 0
        seen.append(confined.stdout.text().strip())
    assert seen == ["[]", "['kernel']", "[]"]


@pytest.mark.parametrize("level", RUNGS)
def test_the_project_cannot_be_written(tmp_path, level):
    """Where it can be read at all, as a folder of gates that somebody allowed."""
    code = f"""
from pathlib import Path
for path in (r"{PACKAGE}/gates/__init__.py", r"{PACKAGE}/new"):
    try:
        Path(path).open("a")
        print("opened", path)
    except OSError:
        pass
print(len(Path(r"{PACKAGE}/gates/__init__.py").read_text()) > 100)
"""
    done = python(code, tmp_path, level, readable=[PACKAGE])
    assert done.stdout.strip() == "True", done


@pytest.mark.parametrize("level", RUNGS)
def test_limits_hold(tmp_path, level):
    code = """
import resource
print([resource.getrlimit(getattr(resource, name)) for name in NAMES])
""".replace("NAMES", str([*rungs.LIMITS]))
    done = python(code, tmp_path, level)
    for (soft, hard), limit in zip(eval(done.stdout), rungs.LIMITS.values(), strict=True):
        assert 0 <= soft <= limit and 0 <= hard <= limit


@pytest.mark.parametrize("level", RUNGS)
def test_a_crowd_of_processes_is_ended(tmp_path, monkeypatch, level):
    """By count: root is exempt from RLIMIT_NPROC."""
    monkeypatch.setattr(sandbox, "MOST_PROCESSES", 20)
    code = """
import os, time
for _ in range(60):
    if os.fork() == 0:
        time.sleep(50)
        os._exit(0)
time.sleep(50)
"""
    started = time.monotonic()
    done = python(code, tmp_path, level, timeout_s=40)
    assert time.monotonic() - started < 30 and not done.timed_out
    assert done.rc != 0 and "processes" in done.stderr


def test_without_user_namespaces_and_mounts_the_second_rung_holds(tmp_path):
    """As in a plain container: the calls that bubblewrap needs are refused to a whole process."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "own").mkdir()
    code = f"""
import platform, sys
from pathlib import Path
from metainfer_lab import sandbox
from metainfer_lab.sandbox import confine, rungs
calls = {{"x86_64": [165, 272], "aarch64": [40, 97]}}  # mount, unshare
confine.FORBIDDEN[platform.machine()] = calls[platform.machine()]
confine.check(confine.libc.prctl(confine.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
confine.seccomp(sockets=True, local=False)
print(rungs.choose(), bool(rungs.leaks("bubblewrap")), rungs.leaks("landlock"))
done = sandbox.run(["python", "-c", "open(r'{secret}')"], Path(r"{tmp_path}/own"))
print(done.level, "PermissionError" in done.stderr)
"""
    env = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.split("\n")[:2] == ["landlock True ()", "landlock True"], done


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

"""The batch runner tells the truth whatever becomes of the kernel; about 25 s, kernels start."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from metainfer_lab import notebook_files, notebooks, paths
from metainfer_lab.errors import InputError


def make(folder: Path, *sources: str, name: str = "77_try.ipynb", **metadata: object) -> Path:
    """A notebook: a heading, a parameters cell, then the given code cells."""
    parameters = new_code_cell('machine: str = "cpu"\nphases: list = ["model"]\nsize: int = 3')
    parameters.metadata["tags"] = ["parameters"]
    cells = [new_markdown_cell("# Try"), parameters]
    for source in sources:
        cells += [new_markdown_cell(f"## Do {source[:12]}"), new_code_cell(source)]
    path = folder / name
    nbformat.write(new_notebook(cells=cells, metadata=metadata), path)
    return path


def run(path: Path, timeout_s: float = 60, **parameters: object) -> notebooks.Outcome:
    out = path.parent / "out"
    return notebooks.run_one(path, parameters, timeout_s=timeout_s, quiet=True, out=out)


def test_what_was_printed_in_pieces_is_one_output():
    streams = [("stdout", "The cap"), ("stdout", "ital"), ("stderr", "!"), ("stdout", "of")]
    said = [new_output("stream", name=name, text=text) for name, text in streams]
    value = new_output("execute_result", data={"text/plain": "1"}, execution_count=1)
    cell = new_code_cell("1", outputs=[*said, value])
    book = notebook_files.scrub(new_notebook(cells=[cell, new_markdown_cell("# Try")]))
    kept = [output.get("text") for output in book.cells[0].outputs]
    assert kept == ["The capital", "!", "of", None]


def test_passed_run_is_scrubbed_parameterised_and_reported(tmp_path):
    """No kernelspec in the file either: papermill alone refuses such a notebook."""
    path = make(tmp_path, "import os\nprint(os.getcwd())", "print('size', size)")
    outcome = run(path, size=8)
    assert outcome.status == "ok" and outcome.last_line == "size 8"
    assert [cell.title for cell in outcome.cells[-2:]] == ["Do import os", "Do print('size'"[:15]]
    written = tmp_path / "out" / path.name
    text = written.read_text()
    assert str(paths.ROOT) not in text and '"papermill"' not in text
    assert notebooks.read_status(tmp_path / "out/77_try.run.json") == outcome
    clean = notebook_files.without_injection(notebook_files.read_notebook(written))
    counts = [cell.execution_count for cell in clean.cells if cell.cell_type == "code"]
    assert counts == [1, 2, 3]


@pytest.mark.parametrize(
    ("source", "status", "says"),
    [
        ("raise KeyError('gone')", "failed", "KeyError"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "dead-kernel", "died"),
        ("import sys\nsys.exit(3)", "failed", "SystemExit"),
        ("%run nowhere.py", "failed", "nowhere.py"),
        ("input('a name? ')", "failed", "StdinNotImplemented"),
    ],
)
def test_cell_that_fails_is_named(tmp_path, source, status, says):
    path = make(tmp_path, "1 + 1", source, "print('never')")
    outcome = run(path, size=8)
    assert outcome.status == status and says in outcome.error
    failed = outcome.failed_cell
    assert failed.title.startswith(f"Do {source[:5]}")
    assert failed.index == 5, "as in the source: papermill's own cells shift nothing"
    assert len(outcome.cells) == outcome.code_cells - 1
    assert not (tmp_path / "out" / path.name).exists()
    assert (tmp_path / "out" / "77_try.failed.ipynb").exists()


def test_clean_exit_in_the_middle_is_no_pass(tmp_path):
    """papermill takes SystemExit(0) for success and runs on, or stops with unrun cells."""
    outcome = run(make(tmp_path, "import sys\nsys.exit(0)", "print('after')"))
    assert outcome.status == "failed" and "SystemExit" in outcome.error


def test_hang_ends_at_the_limit_and_leaves_no_process(tmp_path):
    mark = tmp_path / "pids"
    code = (
        "import os, subprocess\np = subprocess.Popen(['sleep', '300'])\n"
        f"open({str(mark)!r}, 'w').write(f'{{os.getpid()}} {{p.pid}}')\nwhile True: pass"
    )
    started = time.monotonic()
    outcome = run(make(tmp_path, code), timeout_s=12)
    assert outcome.status == "timeout" and time.monotonic() - started < 25
    time.sleep(0.5)
    left = [pid for pid in map(int, mark.read_text().split()) if psutil.pid_exists(pid)]
    assert not [p for p in left if psutil.Process(p).status() != psutil.STATUS_ZOMBIE]


def test_earlier_output_never_stands_for_a_failed_run(tmp_path):
    path = make(tmp_path, "print('fine')")
    assert run(path).passed
    make(tmp_path, "raise ValueError('not any more')")
    assert not run(path).passed
    assert not (tmp_path / "out" / path.name).exists()


def test_a_thread_that_never_ends_does_not_keep_a_finished_notebook(tmp_path):
    """papermill has hung after the last cell, waiting for a kernel that does not leave."""
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(300,)).start()"
    outcome = run(make(tmp_path, f"{code}\nprint('done')"))
    assert outcome.status == "ok" and outcome.last_line == "done" and outcome.seconds < 40


def test_a_flood_of_small_messages_arrives_whole(tmp_path):
    code = "for number in range(5000):\n    print(number, flush=True)"
    outcome = run(make(tmp_path, code))
    assert outcome.status == "ok", outcome.error
    saved = notebook_files.read_notebook(tmp_path / "out" / "77_try.ipynb")
    texts = [output.text for output in saved.cells[-1].outputs]
    assert "".join(texts).split() == [str(number) for number in range(5000)]


def test_missing_kernel_is_named(tmp_path):
    path = make(tmp_path, "1")
    outcome = notebooks.run_one(
        path, {}, timeout_s=60, quiet=True, out=tmp_path / "out", kernel="no-such-kernel"
    )
    assert outcome.status == "no-kernel" and "no-such-kernel" in outcome.error


def test_killed_parent_leaves_a_status_that_says_so(tmp_path):
    """The runner itself is killed: `running` of a process that is gone reads as cancelled."""
    path = make(tmp_path, "import time\ntime.sleep(60)")
    runner = in_background(path)
    status = tmp_path / "out/77_try.run.json"
    while not status.exists():
        time.sleep(0.1)
    children = psutil.Process(runner.pid).children(recursive=True)
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait()
    for child in children:
        child.kill()
    assert json.loads(status.read_text())["status"] == "running"
    assert notebooks.read_status(status).status == "cancelled"
    assert not (tmp_path / "out" / path.name).exists(), "what was half written has no name"


def test_parameters_are_checked_before_anything_starts(tmp_path):
    path = make(tmp_path, "1")
    check = notebook_files.check_parameters
    assert check([path], {"machine": "cpu", "size": "4", "phases": ["a"]})[path]["size"] == 4
    for given, says in [({"sise": 4}, "sise"), ({"size": "x"}, "size"), ({"phases": 1}, "phases")]:
        with pytest.raises(InputError, match=says):
            check([path], given)
    with pytest.raises(InputError, match="gpu9"):
        notebooks.run_notebooks([str(path)], machine="gpu9")
    with pytest.raises(InputError, match="99_nothing"):
        notebooks.find(["99_nothing"])
    assert not (tmp_path / "out").exists()


def test_text_is_read_in_the_declared_type(tmp_path):
    """papermill's -p makes 1234567e8 a float, 007 a 7 and loses keys that are no text."""
    path = make(tmp_path, "1")
    notebook = notebook_files.read_notebook(path)
    notebook.cells[1].source += "\nsha: str = ''\nnote: None | str = None\ncut: dict = {}"
    notebook_files.save_notebook(notebook, path)

    def typed(**given: object) -> dict:
        return notebook_files.check_parameters([path], given)[path]

    assert typed(sha="1234567e8", size="12", phases="['a']") == {
        "sha": "1234567e8", "size": 12, "phases": ["a"],
    }  # fmt: skip
    assert typed(sha="007")["sha"] == "007" and typed(note="None")["note"] is None
    with pytest.raises(InputError, match="keys of a dict"):
        typed(cut={1: 2})
    with pytest.raises(InputError, match="'1_0x' is no int"):
        typed(size="1_0x")


def test_text_with_quotes_arrives_as_it_is(tmp_path):
    path = make(tmp_path, "print(machine)")
    hard = "a \"b\" \\ 'c'"
    assert run(path, machine=hard).last_line == hard


def test_an_error_that_a_tag_allows_is_an_error_here(tmp_path):
    path = make(tmp_path, "raise ValueError('allowed')", "print('after')")
    notebook = notebook_files.read_notebook(path)
    notebook.cells[3].metadata["tags"] = ["raises-exception"]
    notebook_files.save_notebook(notebook, path)
    outcome = run(path)
    assert outcome.status == "failed" and "ValueError" in outcome.error


def test_the_kernel_is_this_interpreter_whatever_the_machine_calls_python3(tmp_path, monkeypatch):
    decoy = tmp_path / "share" / "kernels" / "python3"
    decoy.mkdir(parents=True)
    spec = {"argv": ["/bin/false"], "display_name": "other", "language": "python"}
    (decoy / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    outcome = run(make(tmp_path, "import metainfer_lab"))
    assert outcome.status == "ok", outcome.error


def test_declared_artefacts_must_be_written_by_this_run(tmp_path):
    name = f"made-{os.getpid()}.txt"
    made = paths.LOCAL / "test-notebooks" / name
    declared = {"artefacts": [f"data/local/test-notebooks/{name}"]}
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_text("of an earlier run")
    os.utime(made, (1, 1))
    try:
        outcome = run(make(tmp_path, "print('wrote nothing')", **declared))
        assert outcome.status == "failed" and f"{name}: declared, and not written" in outcome.error
        outcome = run(make(tmp_path, f"print(open({str(made)!r}, 'w').write('now'))", **declared))
        assert outcome.status == "ok"
        assert outcome.artefacts == {
            f"data/local/test-notebooks/{name}": hashlib.sha256(b"now").hexdigest()
        }
    finally:
        made.unlink()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_ended_runner_takes_its_kernel_along(tmp_path, number):
    """papermill on SIGTERM leaves a busy kernel behind; on SIGINT it says `completed`."""
    mark = tmp_path / "pid"
    code = f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    runner = in_background(make(tmp_path, code))
    while not mark.exists() or not mark.read_text():
        time.sleep(0.1)
    kernel = psutil.Process(int(mark.read_text()))
    runner.send_signal(number)
    runner.wait(timeout=30)
    gone, alive = psutil.wait_procs([kernel], timeout=15)
    assert gone and not alive
    assert notebooks.read_status(tmp_path / "out/77_try.run.json").status == "cancelled"


def in_background(path: Path) -> subprocess.Popen:
    """A process of its own that runs a notebook, and heeds SIGINT even where ours does not."""
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from pathlib import Path; from metainfer_lab import notebooks as n;"
        f"n.run_one(Path({str(path)!r}), {{}}, timeout_s=60, quiet=True,"
        f" out=Path({str(path.parent / 'out')!r}))"
    )
    return subprocess.Popen([sys.executable, "-c", code], cwd=paths.ROOT)


def test_two_parameters_cells_are_refused(tmp_path):
    path = make(tmp_path, "1")
    notebook = notebook_files.read_notebook(path)
    notebook.cells[3].metadata["tags"] = ["parameters"]
    notebook_files.save_notebook(notebook, path)
    with pytest.raises(InputError, match="2 cells"):
        notebook_files.declared(path)

"""Run notebooks in batch through papermill, and tell the truth about how it went.

papermill says `completed` of notebooks whose kernel was killed or hung, so its word is not used:
each notebook runs in a process of its own, which reports cell by cell over a pipe, and the parent
decides from the reports, the exit and the saved file. Nothing is cached: a run runs.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal

import psutil
from pydantic import BaseModel

from metainfer_lab import paths
from metainfer_lab.errors import InputError
from metainfer_lab.live import BATCH
from metainfer_lab.notebook_files import (
    check_parameters,
    error_outputs,
    last_line,
    place_of,
    read_notebook,
    save_notebook,
    scrub,
    without_injection,
    write_kernel,
)

OUT = paths.NOTEBOOKS / "out"
MACHINES = ("cpu", "h200", "b200")
GRACE_S = 5.0
Status = Literal["running", "ok", "failed", "timeout", "dead-kernel", "no-kernel", "cancelled"]
KINDS: dict[str, Status] = {"DeadKernelError": "dead-kernel", "NoSuchKernel": "no-kernel"}


class CellReport(BaseModel):
    """One code cell as it ran: index in the notebook, the heading above it, seconds."""

    index: int
    title: str
    seconds: float | None = None


class Outcome(BaseModel):
    """What became of one notebook; this is the status file `<name>.run.json`.

    artefacts: SHA-256 of each file that the notebook declares and this run wrote.
    """

    notebook: str
    status: Status
    parameters: dict[str, Any]
    started: str
    pid: int
    seconds: float = 0.0
    returncode: int | None = None
    cells: list[CellReport] = []
    code_cells: int = 0
    failed_cell: CellReport | None = None
    source_sha256: str
    error: str | None = None
    output: str | None = None
    artefacts: dict[str, str] = {}
    last_line: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "ok"


def run_notebooks(
    names: Sequence[str] = (),
    machine: str = "cpu",
    *,
    timeout_s: float = 600.0,
    publish: bool = False,
    quiet: bool = False,
    **parameters: object,
) -> list[Outcome]:
    """Run notebooks one after another, each with a total time limit; all of them for no names.

    names: `00`, `00_start_here` or a path. parameters go to the notebooks that declare them, of
    the declared type; InputError, before anything starts, for a name that none declares. publish
    replaces the committed notebook by its executed, scrubbed self when it passed.
    """
    files = find(names)
    if machine not in MACHINES:
        raise InputError(f"machine: {machine!r} is not known; use {', '.join(MACHINES)}")
    asked = check_parameters(files, {"machine": machine, **parameters})
    outcomes = []
    for path in files:
        outcomes.append(run_one(path, asked[path], timeout_s=timeout_s, quiet=quiet))
        if publish and outcomes[-1].passed:
            save_notebook(without_injection(read_notebook(OUT / path.name)), path)
    if not quiet:
        print(summary(outcomes), flush=True)
    return outcomes


def find(names: Sequence[str], folder: Path | None = None) -> list[Path]:
    """Paths of the named notebooks; InputError lists what there is."""
    known = sorted((folder or paths.NOTEBOOKS).glob("[0-9][0-9]_*.ipynb"))
    if not names:
        return known
    return [_find(name, known) for name in names]


def _find(name: str, known: list[Path]) -> Path:
    if name.endswith(".ipynb") and Path(name).is_file():
        return Path(name).resolve()
    matches = [path for path in known if path.stem == name or path.stem.split("_")[0] == name]
    if not matches:
        there = ", ".join(path.stem for path in known)
        raise InputError(f"notebook {name!r}: not there; there are {there}")
    return matches[0]


def run_one(
    path: Path,
    parameters: dict[str, Any],
    *,
    timeout_s: float,
    quiet: bool = False,
    out: Path | None = None,
    kernel: str = "python3",
) -> Outcome:
    """Run one notebook in its own process; its output and status file land in `out`."""
    out = out or OUT
    out.mkdir(parents=True, exist_ok=True)
    outcome = _start(path, parameters, out)
    job = {
        "input": str(path),
        "output": str(out / f".{path.stem}.running.ipynb"),
        "parameters": parameters,
        "kernel": kernel,
        "cwd": str(paths.ROOT),
    }
    started = time.monotonic()
    try:
        with open(out / f"{path.stem}.log", "w+") as log:
            _watch(outcome, job, log, started + timeout_s, quiet)
    except KeyboardInterrupt:
        outcome.status = "cancelled"
        raise
    finally:
        outcome.seconds = round(time.monotonic() - started, 1)
        _finish(outcome, Path(job["output"]), out)
    return outcome


def _start(path: Path, parameters: dict[str, Any], out: Path) -> Outcome:
    """Remove what an earlier run left, and say that a new one has begun."""
    for stale in (f"{path.stem}.ipynb", f"{path.stem}.failed.ipynb"):
        (out / stale).unlink(missing_ok=True)
    notebook = read_notebook(path)
    outcome = Outcome(
        notebook=path.stem,
        status="running",
        parameters=parameters,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        pid=os.getpid(),
        code_cells=sum(cell.cell_type == "code" for cell in notebook.cells),
        source_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
    )
    _save_status(outcome, out)
    return outcome


def _watch(outcome: Outcome, job: dict, log: IO[str], deadline: float, quiet: bool) -> None:
    """Start the child, follow its reports, and end it and all it started."""
    reports, write_end = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(job), str(write_end)],
        env={**os.environ, BATCH: "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=log,
        pass_fds=(write_end,),
        start_new_session=True,
    )
    os.close(write_end)
    try:
        for report in _reports(reports, deadline):
            _take(outcome, report)
        child.wait(timeout=max(0.0, deadline - time.monotonic()))
    except (TimeoutError, subprocess.TimeoutExpired):
        outcome.status, outcome.error = "timeout", "the notebook's time limit"
    finally:
        os.close(reports)
        _end(child)
        outcome.returncode = child.returncode
    if outcome.status == "running":
        outcome.status = "ok" if child.returncode == 0 else "failed"
        outcome.error = None if outcome.passed else outcome.error or _tail(log)


def _reports(fd: int, deadline: float) -> Iterator[dict]:
    """JSON lines until the pipe closes; TimeoutError at the deadline."""
    from select import select

    pending = b""
    while True:
        if not select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        chunk = os.read(fd, 65536)
        if not chunk:
            return
        *lines, pending = (pending + chunk).split(b"\n")
        yield from (json.loads(line) for line in lines)


def _take(outcome: Outcome, report: dict) -> None:
    if "cell" in report:
        outcome.cells.append(CellReport(**report["cell"]))
    elif "seconds" in report:
        outcome.cells[-1].seconds = report["seconds"]
    else:
        outcome.status = KINDS.get(report["ename"], "failed")
        outcome.error = f"{report['ename']}: {report['evalue']}"
        outcome.failed_cell = outcome.cells[-1] if outcome.cells else None


def _end(child: subprocess.Popen) -> None:
    """Interrupt the child if it still runs, then kill it, its kernel and what that started.

    The kernel leads a session of its own, so that the child's process group does not hold it.
    """
    family = []
    if child.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    child.wait()


def _finish(outcome: Outcome, running: Path, out: Path) -> None:
    """Judge the saved file, give it its name, and write the status file."""
    if outcome.passed:
        outcome.error = _objection(running) or _missing_artefact(running, outcome)
        outcome.status = "failed" if outcome.error else "ok"
    if running.exists():
        kept = out / f"{outcome.notebook}{'' if outcome.passed else '.failed'}.ipynb"
        if outcome.passed:
            notebook = scrub(read_notebook(running))
            outcome.last_line = last_line(notebook)
            save_notebook(notebook, running)
        os.replace(running, kept)
        outcome.output = str(kept)
    outcome.status = "failed" if outcome.status == "running" else outcome.status
    _save_status(outcome, out)


def _objection(saved: Path) -> str | None:
    """Why a notebook whose process ended well did not pass after all."""
    if not saved.exists():
        return "no notebook was saved"
    notebook = read_notebook(saved)
    if errors := error_outputs(notebook):
        return f"error output: {errors[0]}"
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    unrun = [cell for cell in code if cell.execution_count is None]
    return f"{len(unrun)} of {len(code)} code cells did not run" if unrun else None


def _missing_artefact(saved: Path, outcome: Outcome) -> str | None:
    """Note what the run wrote of the files that the notebook declares; name one it did not write.

    `artefacts` in a notebook's metadata lists patterns under the repository's root. A file that an
    earlier run left behind does not count.
    """
    started = datetime.fromisoformat(outcome.started).timestamp()
    for pattern in read_notebook(saved).metadata.get("artefacts", []):
        files = [path for path in paths.ROOT.glob(pattern) if path.stat().st_mtime >= started]
        if not files:
            return f"artefact {pattern}: declared, and not written by this run"
        for path in files:
            name = path.relative_to(paths.ROOT).as_posix()
            outcome.artefacts[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return None


def _save_status(outcome: Outcome, out: Path) -> None:
    text = outcome.model_dump_json(indent=1) + "\n"
    paths.write_atomic(out / f"{outcome.notebook}.run.json", text)


def read_status(path: Path) -> Outcome:
    """A status file; one that says `running` of a process that is gone says `cancelled`."""
    outcome = Outcome.model_validate_json(path.read_text())
    if outcome.status == "running" and not psutil.pid_exists(outcome.pid):
        outcome.status, outcome.error = "cancelled", "the run was killed"
    return outcome


def _tail(log: IO[str]) -> str:
    log.seek(0)
    lines = [line for line in log.read().splitlines() if line.strip()]
    return lines[-1] if lines else "the process ended without a word"


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line a notebook, and beneath it what it says last, or why it failed."""
    width = shutil.get_terminal_size((100, 24)).columns
    lines = [f"{'notebook':24} {'status':12} {'cells':>7} {'seconds':>8}"]
    for outcome in outcomes:
        cells = f"{len(outcome.cells)}/{outcome.code_cells}"
        lines.append(f"{outcome.notebook:24} {outcome.status:12} {cells:>7} {outcome.seconds:8.1f}")
        where = f" in '{outcome.failed_cell.title}'" if outcome.failed_cell else ""
        said = outcome.last_line if outcome.passed else f"{outcome.error}{where}"
        lines.append(f"  {said}" if len(said) < 2 * width else f"  {said[: 2 * width]}...")
    return "\n".join(["", *lines])


def main(arguments: list[str]) -> int:
    """The child's side: papermill on one notebook, each cell reported to the parent."""
    import papermill

    _end_with_parent()
    job, report_fd = json.loads(arguments[0]), int(arguments[1])
    notebook, state = read_notebook(Path(job["input"])), {"title": "", "begun": 0.0}

    def report(**message: object) -> None:
        os.write(report_fd, (json.dumps(message) + "\n").encode())

    def on_cell_execute(cell: Any, cell_index: int) -> None:
        if (place := place_of(cell, notebook)) is None:  # papermill's own, with the parameters
            return
        index, title = place
        if title != state["title"]:
            print(f"\n[{Path(job['input']).stem}] {title}", flush=True)
        state.update(title=title, begun=time.monotonic())
        report(cell={"index": index, "title": title})

    def on_cell_executed(cell: Any, cell_index: int, execute_reply: object) -> None:
        if place_of(cell, notebook):
            report(seconds=round(time.monotonic() - state["begun"], 2))

    try:
        _start_this_python(job["kernel"])
        papermill.execute_notebook(
            job["input"],
            job["output"],
            parameters=job["parameters"],
            kernel_name=job["kernel"],
            language="python",
            cwd=job["cwd"],
            progress_bar=False,
            stdout_file=sys.stdout,
            on_cell_execute=on_cell_execute,
            on_cell_executed=on_cell_executed,
        )
    except Exception as error:
        ename = getattr(error, "ename", type(error).__name__)
        report(ename=ename, evalue=str(getattr(error, "evalue", error))[:2000])
        return 1
    return 0


def _start_this_python(kernel: str) -> None:
    """Let `python3` be this interpreter: a kernel of that name elsewhere lacks this package."""
    if kernel == "python3":
        folder = Path(tempfile.mkdtemp(prefix="metainfer_lab-kernel-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        write_kernel(folder / "kernels" / kernel)
        others = filter(None, [os.environ.get("JUPYTER_PATH")])
        os.environ["JUPYTER_PATH"] = os.pathsep.join([str(folder), *others])


def _end_with_parent() -> None:
    """Let the kernel end this process when its parent is killed: nobody would watch it then."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Figures of the record: each drawn anew from data/, or held to what was published.

A figure is four files: PDF, PNG, the plotted table, and where it comes from (no commit, no time).
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from metainfer_lab import paths
from metainfer_lab.bench import engine_logs, ledger, results
from metainfer_lab.bench.floors import floors
from metainfer_lab.bench.workload import Workload
from metainfer_lab.errors import InputError
from metainfer_lab.figures.bounds import floors_by_batch
from metainfer_lab.figures.matrix import kill_matrix
from metainfer_lab.figures.performance import single_stream, throughput
from metainfer_lab.figures.process import running_best, timeline
from metainfer_lab.figures.style import style
from metainfer_lab.plan import plan
from metainfer_lab.spec import Spec

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MEASURED, REPORTED = paths.RESULTS / "measured.csv", paths.RESULTS / "reported.csv"
_METADATA: dict[str, dict[str, None]] = {
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}


@dataclass(frozen=True)
class Published:
    """A figure of the record: what draws it, its table, and the files that the table is made of."""

    draw: Callable[[pd.DataFrame], Figure]
    table: Callable[[], pd.DataFrame]
    sources: Callable[[], tuple[Path, ...]]


def publish(names: Sequence[str] = (), folder: Path | None = None) -> list[Path]:
    """Draw the named figures (all for none) from the record; the files written."""
    written = []
    for name, figure in _chosen(names).items():
        table = figure.table()
        written += save(figure.draw(table), table, name, folder, figure)
    return written


def check(names: Sequence[str] = (), folder: Path | None = None) -> list[str]:
    """What the published files and the record disagree on, a line each; empty when nothing.

    Tables are compared everywhere, image bytes where matplotlib is of the recorded version.
    """
    return [
        f"{name}: {problem}"
        for name, figure in _chosen(names).items()
        for problem in _problems(name, figure, folder or paths.FIGURES)
    ]


def save(
    figure: Figure,
    table: pd.DataFrame,
    name: str,
    folder: Path | None = None,
    made_by: Published | None = None,
) -> list[Path]:
    """Write NAME.pdf, .png, .csv (what was plotted) and .json (where it comes from).

    The bytes depend on the figure and the libraries' versions alone.
    """
    folder = folder or paths.FIGURES
    blobs = _blobs(figure, table)
    record = provenance(blobs, table) | (_origin(made_by) if made_by else {})
    blobs["json"] = (json.dumps(record, indent=1) + "\n").encode()
    written = [folder / f"{name}.{kind}" for kind in blobs]
    for path, blob in zip(written, blobs.values(), strict=True):
        paths.write_atomic(path, blob)
    return written


def provenance(blobs: dict[str, bytes], table: pd.DataFrame) -> dict[str, object]:
    """Hashes of table and images, library versions, columns."""
    import matplotlib
    import pandas

    return {
        "sha256": {kind: hashlib.sha256(blob).hexdigest() for kind, blob in sorted(blobs.items())},
        "versions": {"matplotlib": matplotlib.__version__, "pandas": pandas.__version__},
        "columns": list(table.columns),
    }


def _blobs(figure: Figure, table: pd.DataFrame) -> dict[str, bytes]:
    blobs: dict[str, bytes] = {"csv": table.to_csv(index=False, lineterminator="\n").encode()}
    with style():
        for kind, metadata in _METADATA.items():
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, metadata=metadata)
            blobs[kind] = buffer.getvalue()
    return blobs


def _origin(figure: Published) -> dict[str, object]:
    """The drawing function and the hash of its source; the data and their hashes."""
    source = inspect.getsource(figure.draw).encode()
    return {
        "drawn_by": {
            "function": f"{figure.draw.__module__}.{figure.draw.__name__}",
            "sha256": hashlib.sha256(source).hexdigest(),
        },
        "data": {
            path.relative_to(paths.ROOT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in figure.sources()
        },
    }


def _problems(name: str, figure: Published, folder: Path) -> Iterable[str]:
    import matplotlib

    missing = [k for k in ("csv", "json", *_METADATA) if not (folder / f"{name}.{k}").is_file()]
    if missing:
        yield f"not published as {', '.join(missing)}; run `metainfer-lab figures {name}`"
        return
    table = figure.table()
    if difference := _difference(folder / f"{name}.csv", table):
        yield f"the published table is not the record's: {difference}"
        return
    record = json.loads((folder / f"{name}.json").read_text())
    if record["versions"]["matplotlib"] != matplotlib.__version__:
        return
    for kind, blob in _blobs(figure.draw(table), table).items():
        if kind in _METADATA and blob != (folder / f"{name}.{kind}").read_bytes():
            yield f"the published {kind} is not what its table draws"


def _difference(published: Path, table: pd.DataFrame) -> str | None:
    """The first thing in which a table departs from its file; None when they are the same."""
    import pandas as pd

    again = pd.read_csv(io.StringIO(table.to_csv(index=False)))
    try:
        pd.testing.assert_frame_equal(pd.read_csv(published), again, rtol=1e-9)
    except AssertionError as error:
        return " ".join(str(error).split())[:200]
    return None


def _chosen(names: Sequence[str]) -> dict[str, Published]:
    if unknown := [name for name in names if name not in PUBLISHED]:
        raise InputError(f"figures: no {unknown[0]!r}; there are {', '.join(PUBLISHED)}")
    return {name: PUBLISHED[name] for name in names or PUBLISHED}


def _newest(engine: str) -> pd.DataFrame:
    """Rows of the newest measurement in which an engine took part, its rivals' too."""
    rows = results.read(MEASURED)
    of_engine = rows[rows["engine"] == engine].sort_values("timestamp")
    return rows[rows["raw"] == of_engine["raw"].iloc[-1]].reset_index(drop=True)


def _dense_streams(spec: str) -> pd.DataFrame:
    """Qwen3-8B in bf16 at prompts of 1,024 tokens on a spec's H200s: measured, and reported by
    others and by our engine's own script.

    A reported row has no floor of its own; it gets the nominal one of the same point.
    """
    import pandas as pd

    logged = engine_logs.read_run(f"{spec}-a1", spec)
    rows = [results.read(MEASURED), results.read(REPORTED), logged]
    rows = pd.concat([table for table in rows if len(table)], ignore_index=True)
    case = {"model": "qwen3-8b", "gpu": "H200", "precision": "bf16", "prompt_len": 1024}
    for column, value in {**case, "tp": Spec.load(spec).parallel.tp}.items():
        rows = rows[rows[column] == value]
    rows = rows[rows["metric"].isin(["tpot_ms", "decode_tok_s"])].reset_index(drop=True)
    nominal = [_nominal_floor(spec, row) for _, row in rows.iterrows()]
    return rows.assign(floor=rows["floor"].fillna(pd.Series(nominal)))


def _hybrid_streams() -> pd.DataFrame:
    """Qwen3.6-35B-A3B on one H200: a step at 1 to 32 streams, as our engine's own script says."""
    rows = engine_logs.read_run(_HYBRID, _HYBRID.removesuffix("-a1"))
    return rows[rows["metric"] != "ttft_ms"].reset_index(drop=True)


def _nominal_floor(spec: str, row: pd.Series) -> float:
    lengths = {"prompt_len": row["prompt_len"], "output_len": row["output_len"]}
    workload = Workload(**lengths, concurrency=row["batch"])
    return floors(plan(spec), workload)[row["metric"]]


def _floors() -> pd.DataFrame:
    """Floors of the GPU specs that ship, over the batch, at 1,024 cached tokens a stream."""
    import pandas as pd

    frames = [plan(name).floors().assign(spec=name) for name in _BOUNDED]
    rows = pd.concat(frames, ignore_index=True)
    columns = ["spec", "batch", "context", "tpot_ms", "tok_s"]
    return rows.loc[rows["context"] == 1024, columns].reset_index(drop=True)


def _turns() -> pd.DataFrame:
    from metainfer_lab.agent import Run

    turns = Run(paths.RUNS / _GENERATION).timeline()
    return turns[["turn", "phase", "passed", "submission"]]


def _sources(spec: str) -> tuple[Path, ...]:
    return MEASURED, REPORTED, *engine_logs.speaking_logs(paths.RUNS / f"{spec}-a1")


def _matrix() -> pd.DataFrame:
    from metainfer_lab.gates.audit import Audit

    return Audit.recorded().table()


def _tries(run: str, workload: str) -> pd.DataFrame:
    return ledger.best_so_far(ledger.read(paths.RUNS / run / "ledger.tsv"), workload)


_DENSE, _TWO = "qwen3-8b-bf16-h200", "qwen3-8b-bf16-tp2-h200"
_BOUNDED = ("qwen3-8b-bf16-h200", "qwen3-8b-bf16-tp2-h200", "qwen3.6-35b-a3b-nvfp4-h200")
_GENERATION = "smollm2-135m-fp32-cpu-r1"
_HYBRID = "qwen3.6-35b-a3b-nvfp4-h200-a1"
PUBLISHED: dict[str, Published] = {
    "single_stream_smollm2": Published(
        single_stream, lambda: _newest("smollm2-135m-fp32-cpu"), lambda: (MEASURED,)
    ),
    "single_stream_smollm2_int8": Published(
        single_stream, lambda: _newest("smollm2-135m-int8-cpu"), lambda: (MEASURED,)
    ),
    "generation_smollm2": Published(
        timeline, _turns, lambda: (paths.RUNS / _GENERATION / "transcript.jsonl",)
    ),
    "kill_matrix": Published(kill_matrix, _matrix, lambda: (paths.RESULTS / "audit.json",)),
    "floors_h200": Published(
        floors_by_batch,
        _floors,
        lambda: (
            paths.HARDWARE / "h200.yaml",
            *(paths.SPECS / f"{name}.yaml" for name in _BOUNDED),
        ),
    ),
    "throughput_qwen3_8b_h200": Published(
        throughput, lambda: _dense_streams(_DENSE), lambda: _sources(_DENSE)
    ),
    "throughput_qwen3_8b_tp2_h200": Published(
        throughput, lambda: _dense_streams(_TWO), lambda: _sources(_TWO)
    ),
    "throughput_qwen3_6_h200": Published(
        throughput,
        _hybrid_streams,
        lambda: tuple(engine_logs.speaking_logs(paths.RUNS / _HYBRID)),
    ),
    "optimisation_qwen3_6": Published(
        running_best,
        lambda: _tries(_HYBRID, "decode step, 1 stream"),
        lambda: (paths.RUNS / _HYBRID / "ledger.tsv",),
    ),
}

"""What an engine's own measuring script printed on a GPU, as rows beside which ours can stand.

Such numbers come from inside the engine's process (or from a replayed graph, without a host), and
no gate judged the tree: they are *reported*, never measured rows. The last log with whole requests
speaks for an engine, for variants are timed as single steps; without one the last log with steps,
and the last with first tokens, of a try that was kept, and over them what later tries that were
kept say of their own point (row 22-ttft-128 of the first token of 128, row 22-8 of 8 streams). The
lines that are understood (p20, p50, p80; what is marked warm or idle is not):

    32 streams, prompt 1024, 160 new {} n=5: decode tok/s 5589 5594 5624; ...
    1 stream, prompt 128, 128 new, n=7: ttft ms 5.79 5.80 5.84; tpot ms 3.829 3.831 3.832 -> ...
    STEP rows 8: 3742.4 us (p20 3735.1 p80 3750.8) = 2138 tok/s touched/layer 57.2
    TTFT 128: 17.7 ms ['58.5', '17.7', '17.6', '17.8']        (the first of the list warms up)
    PAIR ttft 128 new: 9113.0 us (p20 9104.3, p80 9137.9) n=28
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from metainfer_lab import paths
from metainfer_lab.bench import results
from metainfer_lab.bench.floors import floors
from metainfer_lab.bench.timing import spread
from metainfer_lab.bench.workload import Workload
from metainfer_lab.errors import InputError
from metainfer_lab.plan import plan
from metainfer_lab.spec import Spec

NUMBER = r"([\d.]+)"
THREE = rf"(?:p20/50/80 )?{NUMBER} {NUMBER} {NUMBER}"
STREAMS = re.compile(
    r"^(?!.*\b(?:warm|idle)\b).*?(\d+) streams?, prompt (\d+), (\d+) new"
    r"(?: \{\})?(?:,? n=(\d+))?: (.*)",
    re.MULTILINE,
)
READINGS = {
    "ttft_ms": re.compile(rf"ttft ms {THREE}"),
    "tpot_ms": re.compile(rf"tpot ms {THREE}"),
    "decode_tok_s": re.compile(rf"decode tok/s {THREE}"),
}
STEP = re.compile(
    rf"STEP rows (\d+): {NUMBER} us \(p20 {NUMBER} p80 {NUMBER}\).*touched/layer {NUMBER}"
)
FIRST = re.compile(r"TTFT (\d+): [\d.]+ ms \[([^\]]+)\]")
PAIR = rf"PAIR {{}} new: {NUMBER} us \(p20 {NUMBER}, p80 {NUMBER}\) n=(\d+)"
TRY = re.compile(r"^\d+-(?:(ttft)-)?(\d+)$")  # ids of tries at one point
STEP_CONTEXT = 1088  # cached tokens of a stream when those steps were replayed
HOST = "the engine's own script, submit and step in one process"
GRAPH = "the engine's own script, a captured step replayed, no host and no sampling of text"


def read_run(run: str, spec: str) -> pd.DataFrame:
    """Rows of the logs that speak for a run's engine, under a spec; floors at nominal rates."""
    base = _base(Spec.load(spec))
    found = _spoken(paths.RUNS / run)
    if not found:
        raise InputError(f"run {run}: no log in raw/ holds times that are understood")
    return results.table([base | row | _floor(spec, row) for row in found.values()])


def read_all() -> pd.DataFrame:
    """`read_run` of every run `<spec>-aN` that has a log which speaks."""
    runs = [folder.name for folder in sorted(paths.RUNS.glob("*-a[0-9]*")) if _spoken(folder)]
    return pd.concat([read_run(run, run.rsplit("-a", 1)[0]) for run in runs], ignore_index=True)


def step_times(log: Path) -> pd.DataFrame:
    """us of a replayed decode step by streams: columns p20, p50, p80; empty where none is there."""
    found = STEP.findall(log.read_text())
    rows = {int(streams): map(float, (p20, p50, p80)) for streams, p50, p20, p80, _ in found}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["p20", "p50", "p80"])


def speaking_logs(folder: Path) -> list[Path]:
    """The raw logs that speak for a run's engine (see above); InputError when there is none."""
    if found := _spoken(folder):
        return [paths.ROOT / raw for raw in dict.fromkeys(row["raw"] for row in found.values())]
    raise InputError(f"run {folder.name}: no log in raw/ holds times that are understood")


def _spoken(folder: Path) -> dict[tuple, dict[str, Any]]:
    """What is said of each point and metric, with the log that says it."""
    found: dict[tuple, dict[str, Any]] = {}
    for log, point in _speakers(folder):
        raw = {"raw": log.relative_to(paths.ROOT).as_posix()}
        for row in _rows(log.read_text()) if point is None else _paired(log.read_text(), point):
            before = found.get(_key(row), {})
            touched = {"experts_touched": before.get("experts_touched")} if point else {}
            found[_key(row)] = touched | row | raw
    return found


def _speakers(folder: Path) -> list[tuple[Path, str | None]]:
    """Logs with the point that they are asked for, all of them where None; later ones outdo."""
    logs = sorted((folder / "raw").glob("*.txt"), key=lambda path: _numbers(path.stem))
    if requests := [log for log in logs if STREAMS.search(log.read_text())]:
        return [(requests[-1], None)]
    kept = [*_kept(folder)]
    whole = [[log for _, log in kept if kind.search(log.read_text())] for kind in (FIRST, STEP)]
    single = [
        (log, f"{found[1] or 'step'} {found[2]}") for id_, log in kept if (found := TRY.match(id_))
    ]
    return [*((logs[-1], None) for logs in whole if logs), *single]


def _kept(folder: Path) -> Iterator[tuple[str, Path]]:
    """Ids and raw files of kept tries, in the order of the ledger; a row may name several."""
    table = folder / "ledger.tsv"
    if not table.is_file():
        return
    rows = results.read_rows(table)
    for row in rows[(rows["status"] == "keep") & rows["raw"].notna()].itertuples():
        named = (folder / raw for raw in re.findall(r"[\w./-]+", row.raw))
        yield from ((str(row.id), log) for log in named if log.is_file())


def _numbers(stem: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", stem)]


def _rows(text: str) -> Iterator[dict[str, Any]]:
    for streams, prompt_len, output_len, runs, said in STREAMS.findall(text):
        point = {"batch": int(streams), "prompt_len": int(prompt_len)}
        point |= {"output_len": int(output_len), "n": int(runs) if runs else None}
        for metric, pattern in READINGS.items():
            if match := pattern.search(said):
                yield from _with_twin(point | {"conditions": _said(HOST)}, metric, match.groups())
    for streams, p50, p20, p80, touched in STEP.findall(text):
        point = {"batch": int(streams), "prompt_len": STEP_CONTEXT, "output_len": 1}
        experts = {"experts_touched": float(touched) or None}
        times = [str(float(us) / 1e3) for us in (p20, p50, p80)]
        yield from _with_twin(point | experts | {"conditions": _said(GRAPH)}, "tpot_ms", times)
    for prompt_len, listed in FIRST.findall(text):
        times = [float(ms) for ms in re.findall(NUMBER, listed)][1:]
        point = {"batch": 1, "prompt_len": int(prompt_len), "output_len": 1}
        yield point | {"conditions": _said(HOST), "metric": "ttft_ms"} | asdict(spread(times))


def _paired(text: str, point: str) -> Iterator[dict[str, Any]]:
    """What a paired try says of its new tree at its own point, "ttft 128" or "step 8"."""
    kind, size = point.split()
    for p50, p20, p80, n in re.findall(PAIR.format(point), text):
        times = [str(float(us) / 1e3) for us in (p20, p50, p80)]
        at = {"n": int(n), "output_len": 1}
        if kind == "ttft":
            said = at | {"batch": 1, "prompt_len": int(size), "conditions": _said(HOST)}
            yield from _with_twin(said, "ttft_ms", times)
        else:
            said = at | {"batch": int(size), "prompt_len": STEP_CONTEXT}
            yield from _with_twin(said | {"conditions": _said(GRAPH)}, "tpot_ms", times)


def _with_twin(base: dict, metric: str, values: tuple[str, ...] | list[str]) -> Iterator[dict]:
    """A reading, and the time or rate that is the same reading seen from the other side."""
    found = dict(zip(("p20", "p50", "p80"), map(float, values), strict=True))
    yield base | {"metric": metric} | found
    twins = {"tpot_ms": "decode_tok_s", "decode_tok_s": "tpot_ms"}
    if twin := twins.get(metric):
        turned = zip(("p80", "p50", "p20"), found.values(), strict=True)
        yield base | {"metric": twin} | {name: 1e3 * base["batch"] / v for name, v in turned}


def _said(timing: str) -> str:
    requests = "greedy, ignore_eos, random prompts"
    decoding = requests if timing == HOST else "one step replayed, no text is made"
    return results.pairs({"timing": timing, "decoding": decoding, "verdict": "no gate's"})


def _base(spec: Spec) -> dict[str, Any]:
    from metainfer_lab.engine.manifest import find_engine

    shared = {"origin": "reported", "engine": find_engine(spec).name, "weights": "seeded"}
    machine = {"gpu": spec.hardware.upper(), "n_gpu": spec.parallel.tp, "tp": spec.parallel.tp}
    model = {"model": spec.model, "precision": spec.precision.weights}
    return shared | machine | model | {"timestamp": "not stated"}


def _key(row: dict) -> tuple:
    return tuple(row[column] for column in (*results.POINT, "metric"))


def _floor(spec: str, row: dict) -> dict[str, Any]:
    lengths = {"prompt_len": row["prompt_len"], "output_len": max(2, row["output_len"])}
    workload = Workload(**lengths, concurrency=row["batch"])
    floor = floors(plan(spec), workload, row.get("experts_touched"))[row["metric"]]
    return {"floor": floor, "unit": results.METRICS[row["metric"]]}

"""What an engine's own measuring script printed on a GPU, as rows beside which ours can stand.

Such numbers come from inside the engine's process (or from a replayed graph, without a host), and
no gate judged the tree: they are *reported*, never measured rows. Which log speaks for an engine is
its ledger's to say: that of the last try that was kept. The lines that are understood:

    32 streams, prompt 1024, 160 new {}: decode tok/s p20/50/80 5733 5749 5762; ...
    1 stream, prompt 128, 128 new: ttft ms p20/50/80 5.9 6.0 6.2; tpot ms 3.79 3.80 3.80 -> ...
    STEP rows 8: 3742.4 us (p20 3735.1 p80 3750.8) = 2138 tok/s touched/layer 57.2
    TTFT 128: 17.7 ms ['58.5', '17.7', '17.6', '17.8']        (the first of the list warms up)
    KERNEL rows 1 single_in: 40 x 8.70 us = 348
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
from metainfer_lab.bench.compare import floors
from metainfer_lab.bench.timing import spread
from metainfer_lab.bench.workload import Workload
from metainfer_lab.errors import InputError
from metainfer_lab.plan import plan
from metainfer_lab.spec import Spec

NUMBER = r"([\d.]+)"
THREE = rf"{NUMBER} {NUMBER} {NUMBER}"
STREAMS = re.compile(r"(\d+) streams?, prompt (\d+), (\d+) new(?: \{\})?: (.*)")
READINGS = {
    "ttft_ms": re.compile(rf"ttft ms p20/50/80 {THREE}"),
    "tpot_ms": re.compile(rf"tpot ms {THREE}"),
    "decode_tok_s": re.compile(rf"decode tok/s p20/50/80 {THREE}"),
}
STEP = re.compile(
    rf"STEP rows (\d+): {NUMBER} us \(p20 {NUMBER} p80 {NUMBER}\).*touched/layer {NUMBER}"
)
FIRST = re.compile(r"TTFT (\d+): [\d.]+ ms \[([^\]]+)\]")
STEP_CONTEXT = 1088  # cached tokens of a stream when those steps were replayed
KERNEL = re.compile(rf"KERNEL rows (\d+) ([\w.]+): (\d+) x {NUMBER} us")
HOST = "the engine's own script, submit and step in one process"
GRAPH = "the engine's own script, a captured step replayed, no host and no sampling of text"


def read_run(run: str, spec: str) -> pd.DataFrame:
    """Rows of the log that speaks for a run's engine, under a spec; floors at nominal rates."""
    log, base = speaking_log(paths.RUNS / run), _base(Spec.load(spec))
    raw = log.relative_to(paths.ROOT).as_posix()
    found = {_key(row): row for row in _rows(log.read_text())}
    return results.table([base | row | {"raw": raw} | _floor(spec, row) for row in found.values()])


def kernel_times(run: str) -> pd.DataFrame:
    """Columns streams, kernel, launches, us (of one launch, alone), from the log that speaks."""
    found = KERNEL.findall(speaking_log(paths.RUNS / run).read_text())
    rows = [(int(streams), name, int(count), float(us)) for streams, name, count, us in found]
    return pd.DataFrame(rows, columns=["streams", "kernel", "launches", "us"])


def step_times(log: Path) -> pd.DataFrame:
    """us of a replayed decode step by streams: columns p20, p50, p80; empty where none is there."""
    found = STEP.findall(log.read_text())
    rows = {int(streams): map(float, (p20, p50, p80)) for streams, p50, p20, p80, _ in found}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["p20", "p50", "p80"])


def speaking_log(folder: Path) -> Path:
    """The raw log of the last kept try that holds such lines; InputError when there is none."""
    ledgers = [folder / name for name in ("ledger.tsv", "attempts.tsv")]
    for table in filter(Path.is_file, ledgers):
        tries = results.read_rows(table)
        for raw in reversed(tries.loc[tries["status"] == "keep", "raw"].tolist()):
            text = (folder / raw).read_text()
            if STEP.search(text) or any(pattern.search(text) for pattern in READINGS.values()):
                return folder / raw
    raise InputError(f"run {folder.name}: no log of a kept try holds times that are understood")


def _rows(text: str) -> Iterator[dict[str, Any]]:
    for streams, prompt_len, output_len, said in STREAMS.findall(text):
        point = {
            "batch": int(streams),
            "prompt_len": int(prompt_len),
            "output_len": int(output_len),
        }
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


def _with_twin(base: dict, metric: str, values: tuple[str, ...] | list[str]) -> Iterator[dict]:
    """A reading, and the time or rate that is the same reading seen from the other side."""
    found = dict(zip(("p20", "p50", "p80"), map(float, values), strict=True))
    yield base | {"metric": metric} | found
    twins = {"tpot_ms": "decode_tok_s", "decode_tok_s": "tpot_ms"}
    if twin := twins.get(metric):
        turned = zip(("p80", "p50", "p20"), found.values(), strict=True)
        yield base | {"metric": twin} | {name: 1e3 * base["batch"] / v for name, v in turned}


def _said(timing: str) -> str:
    decoding = "greedy, ignore_eos, random prompts"
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

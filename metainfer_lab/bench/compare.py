"""`bench`: an engine and its rivals, in turn, on one workload, as rows of the result schema."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from metainfer_lab import paths
from metainfer_lab.bench import results
from metainfer_lab.bench.floors import floor_kind, floors
from metainfer_lab.bench.rivals import Company, gpu_memory
from metainfer_lab.bench.timing import (
    Ratio,
    Sample,
    agreement,
    in_turn,
    paired_ratio,
    sample_from,
    spread,
)
from metainfer_lab.bench.workload import Workload
from metainfer_lab.engine import Engine
from metainfer_lab.errors import InputError
from metainfer_lab.hardware import Hardware, usable_cores
from metainfer_lab.live import Live, Silent
from metainfer_lab.plan import Plan, plan
from metainfer_lab.spec import Spec

if TYPE_CHECKING:
    import pandas as pd


class Judgement(Protocol):
    """What rows need of a verdict: its hash, and its record."""

    @property
    def hash(self) -> str: ...

    def model_dump_json(self) -> str: ...


@dataclass
class Measurement:
    """Samples of one run, by contender; `products` holds rates alone (tok/s)."""

    engine: str
    tree: str
    plan: Plan
    workload: Workload
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    products: list[float] = field(default_factory=list)
    about: dict[str, dict[str, object]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    experts_touched: float | None = None

    def rates(self, name: str) -> list[float]:
        """Decode tok/s of each run of one contender."""
        if name == "products":
            return self.products
        return [sample.decode_tok_s for sample in self.samples[name]]

    def ratio(self, rival: str) -> Ratio:
        """Decode rate of the engine over a rival's, pair by pair."""
        return paired_ratio(self.rates(self.engine), self.rates(rival))

    @property
    def rivals(self) -> list[str]:
        """Who ran beside the engine."""
        return [
            *(n for n in self.samples if n != self.engine),
            *(["products"] * bool(self.products)),
        ]


def bench(
    engine: Engine | Spec | Path | str,
    *,
    beside: Sequence[str] = (),
    workload: Workload | None = None,
    verdict: Judgement | None = None,
) -> pd.DataFrame:
    """Measure an engine, and beside it rivals: `transformers`, `vllm`, `vllm-in-process`,
    `llama.cpp`, or `products` (one token's matrix products alone).

    What the spec's goals compare with is measured along. The rows carry live numbers of this
    machine; `rows.attrs["ratios"]` holds the engine's ratio to each rival with its spread, and
    `rows.attrs["saved"]` the file from which `record` publishes them. verdict: what says that this
    engine is right. InputError for an unknown rival, or one that cannot run here.
    """
    if isinstance(engine, Engine):
        measured = measure(engine, beside=beside, workload=workload)
    else:
        with Engine.open(engine) as opened:
            measured = measure(opened, beside=beside, workload=workload)
    return to_rows(measured, verdict)


def measure(
    engine: Engine,
    *,
    beside: Sequence[str] = (),
    workload: Workload | None = None,
    live: Live | Silent | None = None,
    company: Company | None = None,
) -> Measurement:
    """Time an open engine and its rivals in turn, one warm-up each, after all are loaded.

    company: rivals that stay open for other points, in place of `beside`.
    """
    live = live or Live()
    workload = workload or Workload.from_spec(engine.spec)
    measured = Measurement(engine.folder.name, engine.tree, plan(engine.spec), workload)
    own = Company(engine.spec, beside, workload.concurrency) if company is None else nullcontext()
    with own as made:
        company = company or made
        runners = {engine.folder.name: _engine_runner(engine, measured)}
        for name in company.names:
            live.update(f"bench: loading {name}")
            runners[name] = company.runner(name, engine, measured)
        live.update(f"bench: a warm-up each, then {workload.runs} turns of {', '.join(runners)}")
        for run in runners.values():
            run()
        before = engine.process.stats()
        timed = in_turn(runners, workload.runs)
    measured.experts_touched = touched(before, engine.process.stats())
    if engine.device == "cuda":
        measured.about[measured.engine] |= gpu_memory(engine.process.confined.process.pid)
    measured.products = timed.pop("products", [])
    measured.samples = timed
    live.close(f"bench: {summary(measured)}")
    return measured


def touched(before: Mapping, after: Mapping) -> float | None:
    """Distinct experts of a layer in a step, in the mean over the steps between two looks at stats;
    over the engine's whole life where it does not count its steps (`expert_steps`)."""
    if "expert_steps" not in after:
        return after.get("experts_touched")
    looks = [(stats["expert_steps"], stats["experts_touched"] or 0.0) for stats in (before, after)]
    (then, mean_then), (now, mean_now) = looks
    return (mean_now * now - mean_then * then) / (now - then) if now > then else None


def summary(measured: Measurement) -> str:
    """Decode rates, how the baseline ran, and the ratios; one line each."""
    names = [measured.engine, *measured.rivals]
    rates = ", ".join(f"{name} {spread(measured.rates(name)).p50:.1f}" for name in names)
    setting = measured.about.get("transformers", {}).get("setting")
    how = f" (transformers at its best here: {setting})" if setting else ""
    ratios = [f"{measured.ratio(name)} of {name}" for name in measured.rivals]
    return "; ".join([f"decode tok/s: {rates}{how}", *ratios])


def sweep(
    engine: Engine | Spec | Path | str,
    batches: Sequence[int],
    *,
    prompts: Sequence[int] = (),
    beside: Sequence[str] = (),
    verdict: Judgement | None = None,
    **workload: int,
) -> pd.DataFrame:
    """Rows of one stream at further prompt lengths, and at several numbers of streams; `workload`
    replaces lengths and runs of the spec's own.

    Rivals and engine are started once. `rows.attrs["saved"]` lists the files of all points,
    `rows.attrs["ratios"]` each one's ratios.
    """
    engine = engine if isinstance(engine, Engine) else Engine.open(engine)
    spec = engine.spec
    points = [
        Workload.from_spec(spec, **workload | {"prompt_len": length}, concurrency=1)
        for length in prompts
    ]
    points += [Workload.from_spec(spec, **workload, concurrency=batch) for batch in batches]
    # without goals, nothing is measured that they compare with and nobody asked for
    streams, tables = max(point.concurrency for point in points), []
    spec = spec.change(goals={}, workload__concurrency=streams)
    with Company(spec, beside, streams) as company:
        begun = time.perf_counter()
        with Engine(engine.folder, spec) as opened:
            ready = {"ready_s": round(time.perf_counter() - begun, 1)}
            for point in points:
                measured = measure(opened, workload=point, company=company)
                measured.about[measured.engine] |= ready
                tables.append(to_rows(measured, verdict))
    return _joined(tables)


def reopened(folder: Path, engine: str, point: str = "c*-p*") -> pd.DataFrame:
    """Rows of an engine as `sweep` returned them, from the files that it saved; point: which ones,
    as the files are named (c1-p1024: one stream, a prompt of 1,024 tokens)."""
    tables = []
    for path in sorted(folder.glob(f"{engine}-{point}-*.csv")):
        raw = json.loads(path.with_suffix(".json").read_text())["samples"]
        rates = {name: [one["decode_tok_s"] for one in runs] for name, runs in raw.items()}
        ours = rates.pop(engine)
        table = results.read(path)
        table.attrs["saved"] = path.name
        table.attrs["ratios"] = {name: str(paired_ratio(ours, its)) for name, its in rates.items()}
        tables.append(table)
    if not tables:
        raise InputError(f"{folder}: no rows of {engine}; give the folder that bench saved them in")
    return _joined(tables)


def _joined(tables: list[pd.DataFrame]) -> pd.DataFrame:
    import pandas as pd

    whole = pd.concat(tables, ignore_index=True)
    whole.attrs["saved"] = " ".join(table.attrs["saved"] for table in tables)
    whole.attrs["ratios"] = [table.attrs["ratios"] for table in tables]
    return whole


def to_rows(measured: Measurement, verdict: Judgement | None = None) -> pd.DataFrame:
    """Rows of the result schema; rows, raw samples and verdict are kept in data/local/bench."""
    stamp = results.now()
    point = f"c{measured.workload.concurrency}-p{measured.workload.prompt_len}"
    name = f"{measured.engine}-{point}-{stamp.replace(':', '')}"
    saved = paths.LOCAL / "bench" / f"{name}.csv"
    raw = saved.with_suffix(".json")
    _save_raw(measured, raw)
    measured.about[measured.engine] |= agreement(measured.samples[measured.engine])
    base = _common(measured)
    base |= {"raw": raw.relative_to(paths.ROOT).as_posix(), "timestamp": stamp}
    rows = [row for name in measured.samples for row in _rows_of(measured, name, base)]
    if measured.products:
        bare = base | {"weights": "seeded"}
        rows.append(_row(measured, "products", "decode_tok_s", measured.products, bare))
    for row in rows:
        if row["engine"] == measured.engine:
            row |= {"engine_tree": measured.tree, "verdict": verdict.hash if verdict else None}
            row |= {"experts_touched": measured.experts_touched}
    table = results.table(rows)
    paths.write_atomic(saved, table.to_csv(index=False, lineterminator="\n"))
    if verdict:
        paths.write_atomic(saved.with_suffix(".verdict.json"), verdict.model_dump_json() + "\n")
    table.attrs["ratios"] = {name: str(measured.ratio(name)) for name in measured.rivals}
    table.attrs["saved"] = saved.relative_to(paths.ROOT).as_posix()
    return table


def _engine_runner(engine: Engine, measured: Measurement) -> Callable[[], Sample]:
    workload = measured.workload
    prompts = workload.prompts(measured.plan.dims.vocab_size)
    measured.about[measured.engine] = {"threads": usable_cores()}

    def run() -> Sample:
        batch = next(prompts)
        if engine.device == "cpu":
            return time_engine(engine, workload, batch)
        engine.process.mark()
        sample = time_engine(engine, workload, batch)
        return replace(sample, device_ms=engine.process.mark())

    return run


def time_engine(engine: Engine, workload: Workload, batch: list[list[int]]) -> Sample:
    """One run of an open engine on one batch of prompts; the clock is outside its process.

    Streams that start one after the other are submitted while the earlier ones run.
    """
    starts: list[float] = []
    events = _events(engine, workload, batch, starts)
    return sample_from(events, batch, starts=starts if workload.gap_ms else None)


def _events(
    engine: Engine, workload: Workload, batch: list[list[int]], starts: list[float]
) -> Iterator[tuple[int, int]]:
    """(stream, token) as they arrive; notes in `starts` when each stream was submitted."""
    process, params, streams = engine.process, workload.params(), {}
    begun, gap = time.perf_counter(), workload.gap_ms / 1e3

    def submit_due() -> None:
        while len(starts) < len(batch) and time.perf_counter() - begun >= len(starts) * gap:
            stream = len(starts)
            starts.append(time.perf_counter() - begun)
            streams[process.submit(batch[stream], params)] = stream

    while len(starts) < len(batch):
        time.sleep(max(0.0, begun + len(starts) * gap - time.perf_counter()))
        submit_due()
        for arrival in process.run():
            submit_due()
            yield from ((streams[result.request], result.token) for result in arrival.results)


def _rows_of(measured: Measurement, name: str, base: dict) -> Iterator[dict]:
    for metric in results.METRICS:
        values = [getattr(sample, metric) for sample in measured.samples[name]]
        yield _row(measured, name, metric, values, base)


def _row(measured: Measurement, name: str, metric: str, values: list[float], base: dict) -> dict:
    planned = _plan_of(measured, name)
    others = ", ".join(n for n in [measured.engine, *measured.rivals] if n != name)
    conditions = {
        "timing": f"host clock outside the process, in turn with {others or 'nobody'}",
        "decoding": "greedy, ignore_eos, random prompts never repeated",
        "floor": floor_kind(planned),
        **({"arrivals": f"one every {gap:g} ms"} if (gap := measured.workload.gap_ms) else {}),
        **measured.about.get(name, {}),
    }
    return {
        **base,
        **asdict(spread(values)),
        "engine": name,
        "precision": planned.spec.precision.weights,
        "metric": metric,
        "unit": results.METRICS[metric],
        "floor": floors(planned, measured.workload, measured.experts_touched)[metric],
        "conditions": results.pairs(conditions),
    }


def _common(measured: Measurement) -> dict[str, object]:
    spec, hardware, workload = measured.plan.spec, measured.plan.hardware, measured.workload
    return {
        "origin": "live",
        "model": spec.model,
        "weights": "seeded" if "seeded" in spec.checkpoint.source else "real",
        "precision": spec.precision.weights,
        "tp": spec.parallel.tp,
        "gpu": hardware.name.upper() if hardware.is_gpu else hardware.title,
        "n_gpu": spec.parallel.tp if hardware.is_gpu else 0,
        "batch": workload.concurrency,
        "prompt_len": workload.prompt_len,
        "output_len": workload.output_len,
        "versions": results.pairs(measured.versions | _versions(hardware)),
    }


def _versions(hardware: Hardware) -> dict[str, str]:
    """torch, and on a GPU what else decides about kernels: Triton and the driver.

    InputError when the GPU is not the one that the rows would name.
    """
    from importlib.metadata import version

    found = {"torch": version("torch")}
    if hardware.is_gpu:
        ask = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        name, driver = subprocess.check_output(ask, text=True).splitlines()[0].split(", ")
        if hardware.name not in name.lower():
            raise InputError(f"hardware: the spec is for {hardware.name}; this machine has {name}")
        found |= {"triton": version("triton"), "driver": driver}
    return found


def _plan_of(measured: Measurement, name: str) -> Plan:
    """The plan whose floor a contender is held to: transformers runs unquantised."""
    if name != "transformers":
        return measured.plan
    plain = "bf16" if measured.plan.hardware.is_gpu else "fp32"
    spec = measured.plan.spec.change(precision__weights=plain, precision__activations=plain)
    return plan(spec)


def _save_raw(measured: Measurement, path: Path) -> None:
    data = {
        "engine": measured.engine,
        "tree": measured.tree,
        "workload": measured.workload.model_dump(),
        "samples": {name: [asdict(s) for s in runs] for name, runs in measured.samples.items()},
        "products": measured.products,
    }
    paths.write_atomic(path, json.dumps(data, default=str))

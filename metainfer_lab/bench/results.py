"""One row is one quantity of one engine at one operating point: the schema of all results."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pandera.pandas as pa

from metainfer_lab import paths
from metainfer_lab.errors import InputError

ORIGINS = ("live", "recorded", "reported")
METRICS = {"ttft_ms": "ms", "tpot_ms": "ms", "decode_tok_s": "tok/s", "output_tok_s": "tok/s"}
RATES = tuple(metric for metric, unit in METRICS.items() if unit == "tok/s")
# How the floor of a row was found. Beyond a nominal one lies a wrong clock or skipped work; a floor
# from a measured rate can be passed by noise, one of memory where the cache holds the weights.
FLOORS = ("nominal", "measured", "cache-resident")
# What a measured row must say of itself besides its columns, as key=value in `conditions`.
REQUIRED_CONDITIONS = ("timing", "decoding", "floor")


class ResultRow(pa.DataFrameModel):
    """Columns of a result table. Times in ms, rates in tokens a second, spread as percentiles."""

    origin: str = pa.Field(isin=ORIGINS)
    engine: str = pa.Field(str_length={"min_value": 1})
    engine_tree: str = pa.Field(nullable=True)
    model: str
    weights: str = pa.Field(isin=("real", "seeded"), nullable=True)
    precision: str = pa.Field(nullable=True)
    tp: pd.Int64Dtype = pa.Field(ge=1, nullable=True)
    gpu: str
    n_gpu: pd.Int64Dtype = pa.Field(ge=0, nullable=True)
    batch: pd.Int64Dtype = pa.Field(ge=1)
    prompt_len: pd.Int64Dtype = pa.Field(ge=0, nullable=True)
    output_len: pd.Int64Dtype = pa.Field(ge=1, nullable=True)
    metric: str = pa.Field(isin=tuple(METRICS))
    unit: str = pa.Field(isin=tuple(METRICS.values()))
    n: pd.Int64Dtype = pa.Field(ge=1, nullable=True)
    p20: float = pa.Field(gt=0, nullable=True)
    p50: float = pa.Field(gt=0)
    p80: float = pa.Field(gt=0, nullable=True)
    floor: float = pa.Field(gt=0, nullable=True)
    experts_touched: float = pa.Field(ge=0, nullable=True)
    verdict: str = pa.Field(nullable=True)
    conditions: str
    versions: str = pa.Field(nullable=True)
    raw: str
    timestamp: str

    class Config:
        """Nothing beside the columns above, and each of its own type."""

        strict = True
        coerce = True
        ordered = True


COLUMNS = tuple(ResultRow.to_schema().columns)
# A reported number may leave these open; a measured one knows them all.
MEASURED = ("weights", "precision", "tp", "n_gpu", "prompt_len", "output_len", "n", "p20", "p80")
MEASURED_TEXT = ("versions",)
# One measurement: rows that share these came from one engine in one run.
RUN = ["engine", "gpu", "raw", "timestamp"]
POINT = ["batch", "prompt_len", "output_len"]


def now() -> str:
    """UTC time of a row, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def pairs(values: Mapping[str, object]) -> str:
    """Conditions or versions as one CSV field: `key=value; key=value`."""
    return "; ".join(f"{key}={value}" for key, value in values.items())


def unpair(text: str | float) -> dict[str, str]:
    """The inverse of `pairs`; words without a value map to an empty string."""
    parts = str(text).split(";") if isinstance(text, str) else []
    return dict((*part.strip().split("=", 1), "")[:2] for part in parts if part.strip())


def table(rows: list[dict]) -> pd.DataFrame:
    """Rows as a checked table; columns that a row leaves out are null."""
    return check(pd.DataFrame(rows).reindex(columns=list(COLUMNS)))


def check(rows: pd.DataFrame) -> pd.DataFrame:
    """The same rows with exact types; InputError names the row and what is wrong with it."""
    try:
        rows = ResultRow.validate(rows, lazy=True)
    except pa.errors.SchemaErrors as error:
        case = error.failure_cases.iloc[0]
        raise InputError(
            f"results: column {case['column']}, row {case['index']}: {case['failure_case']!r} "
            f"does not satisfy {case['check']}"
        ) from None
    for index, row in rows.iterrows():
        problem = _lacking(row) or _unit(row) or _beyond_physics(row)
        if problem:
            raise InputError(f"results: {row['engine']}, {row['metric']}, row {index}: {problem}")
    _one_point_each(rows)
    return rows


def _lacking(row: pd.Series) -> str | None:
    if row["origin"] == "reported":
        return None if row["raw"] else "a reported number needs its source in `raw`"
    missing = [c for c in (*MEASURED, *MEASURED_TEXT) if pd.isna(row[c])]
    stated = unpair(row["conditions"])
    missing += [f"conditions: {key}" for key in REQUIRED_CONDITIONS if key not in stated]
    return f"a measured row must state {', '.join(missing)}" if missing else None


def _unit(row: pd.Series) -> str | None:
    expected = METRICS[row["metric"]]
    if row["unit"] != expected:
        return f"is in {expected}, not {row['unit']}; convert it first"
    if not pd.isna(row["p20"]) and not row["p20"] <= row["p50"] <= row["p80"]:
        return f"percentiles out of order: {row['p20']}, {row['p50']}, {row['p80']}"
    return None


def _beyond_physics(row: pd.Series) -> str | None:
    kind = unpair(row["conditions"]).get("floor", "nominal")
    if kind not in FLOORS:
        return f"conditions: floor is one of {', '.join(FLOORS)}, not {kind!r}"
    if pd.isna(row["floor"]) or kind != "nominal":
        return None
    is_rate = row["metric"] in RATES
    best = row["p80"] if is_rate else row["p20"]
    best = row["p50"] if pd.isna(best) else best
    if best > row["floor"] if is_rate else best < row["floor"]:
        return (
            f"{best:.4g} {row['unit']} is beyond the floor of {row['floor']:.4g} at nominal rates: "
            "the clock is wrong, work was skipped, or the floor is of another workload"
        )
    return None


def _one_point_each(rows: pd.DataFrame) -> None:
    measured = rows[rows["origin"] != "reported"]
    for run, group in measured.groupby(RUN):
        _refuse_repeats(run[0], group)
        for point, at in group.groupby(POINT):
            _refuse_mixture(run[0], point, at.set_index("metric"))


def _refuse_repeats(engine: str, group: pd.DataFrame) -> None:
    if group.duplicated([*POINT, "metric"]).any():
        raise InputError(f"results: {engine}: one metric twice at one operating point of one run")


def _refuse_mixture(engine: str, point: tuple, rows: pd.DataFrame) -> None:
    """TPOT and decode rate of one point are two views of one clock: rate x TPOT >= batch, and equal
    but for the steps in which a stream waits for another's prompt; the rate with prefill included
    counts those too, so with it the product is the batch at most.

    Percentiles of a noisy run need not multiply exactly, so the spread counts in favour.
    """
    if not {"tpot_ms", "decode_tok_s"} <= set(rows.index):
        return
    whole = "output_tok_s" if "output_tok_s" in rows.index else "decode_tok_s"
    rate, tpot = rows.loc["decode_tok_s"], rows.loc["tpot_ms"]
    fewest, most = rows.loc[whole]["p20"] * tpot["p20"] / 1000, rate["p80"] * tpot["p80"] / 1000
    if not (most >= point[0] / 1.15 and 0.85 * fewest <= point[0]):
        raise InputError(
            f"results: {engine}: {rate['p50']:.4g} tok/s at {tpot['p50']:.4g} ms a token are "
            f"{fewest:.2f} to {most:.2f} streams, not {point[0]}: the rows mix operating points"
        )


def read(path: Path) -> pd.DataFrame:
    """A checked table from its CSV; an absent file is an empty table."""
    return check(read_rows(path)) if path.exists() else table([])


def append(path: Path, rows: pd.DataFrame) -> pd.DataFrame:
    """Add checked rows to a CSV, whole or not at all; returns the whole table."""
    return append_rows(path, check(rows), check)


def read_rows(path: Path) -> pd.DataFrame:
    """A .csv or .tsv as it stands, unchecked; names of rows stay text."""
    return pd.read_csv(path, sep=_separator(path), dtype={"id": str, "parent": str})


def append_rows(
    path: Path, rows: pd.DataFrame, checked: Callable[[pd.DataFrame], pd.DataFrame]
) -> pd.DataFrame:
    """Append under a lock, replacing the file in one step; `checked` judges the whole table."""
    paths.LOCAL.mkdir(parents=True, exist_ok=True)
    with open(paths.LOCAL / f".{path.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        old = [read_rows(path)] if path.exists() else []
        whole = checked(pd.concat([*old, rows], ignore_index=True))
        text = whole.to_csv(index=False, lineterminator="\n", sep=_separator(path))
        paths.write_atomic(path, text)
    return whole


def _separator(path: Path) -> str:
    return "\t" if path.suffix == ".tsv" else ","


def with_currency(rows: pd.DataFrame, gates: Mapping[str, int]) -> pd.DataFrame:
    """Rows with a column `version`: whether engine and verdict are those of today.

    gates: version of each gate as it is now. `current` where engine_tree is the tree hash of
    data/engines/<engine> and every gate of the row's verdict is of today's version, `earlier
    version` where one of them is not, empty for what has no tree here (baselines, reported
    numbers).
    """
    trees = {
        name: paths.tree_hash(paths.ENGINES / name)
        for name in rows["engine"].unique()
        if (paths.ENGINES / name / "engine.json").exists()
    }
    verdicts = {name: _of_today(name, gates) for name in rows["verdict"].dropna().unique()}

    def version(row: pd.Series) -> str:
        if pd.isna(row["engine_tree"]):
            return ""
        same = row["engine_tree"] == trees.get(row["engine"]) and verdicts.get(row["verdict"], True)
        return "current" if same else "earlier version"

    return rows.assign(version=[version(row) for _, row in rows.iterrows()])


def _of_today(verdict: str, gates: Mapping[str, int]) -> bool:
    """Whether the published verdict of this hash was given by gates of these versions."""
    path = paths.RESULTS / "verdicts" / f"{verdict}.json"
    if not path.is_file():
        return False
    judged = json.loads(path.read_text())["gates"]
    return all(gates.get(gate["gate"]) == gate["version"] for gate in judged)

"""One row is one idea that was tried; written by the code that measured it, never by hand."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pandera.pandas as pa

from metainfer_lab.bench.results import append_rows, read_rows
from metainfer_lab.errors import InputError

STATUS = ("keep", "discard", "crash", "timeout", "gate_failed")


class LedgerRow(pa.DataFrameModel):
    """Columns of a ledger. Ratios are new over old throughput, lo and hi their spread."""

    id: str = pa.Field(unique=True)
    parent: str = pa.Field(nullable=True)
    hypothesis: str = pa.Field(str_length={"min_value": 1})
    predicted_ratio: float = pa.Field(gt=0, nullable=True)
    workload: str = pa.Field(nullable=True)
    ratio: float = pa.Field(gt=0, nullable=True)
    ratio_lo: float = pa.Field(gt=0, nullable=True)
    ratio_hi: float = pa.Field(gt=0, nullable=True)
    gates: str = pa.Field(nullable=True)
    lines: pd.Int64Dtype = pa.Field(nullable=True)
    seconds: float = pa.Field(ge=0, nullable=True)
    status: str = pa.Field(isin=STATUS)
    reason: str = pa.Field(nullable=True)
    diff: str = pa.Field(nullable=True)
    raw: str = pa.Field(nullable=True)

    class Config:
        """Nothing beside the columns above, and each of its own type."""

        strict = True
        coerce = True
        ordered = True


COLUMNS = tuple(LedgerRow.to_schema().columns)


def check(rows: pd.DataFrame) -> pd.DataFrame:
    """The same rows with exact types; InputError names the row and what is wrong with it."""
    try:
        rows = LedgerRow.validate(rows, lazy=True)
    except pa.errors.SchemaErrors as error:
        case = error.failure_cases.iloc[0]
        raise InputError(
            f"ledger: column {case['column']}, row {case['index']}: {case['failure_case']!r} "
            f"does not satisfy {case['check']}"
        ) from None
    known: set[str] = set()
    for _, row in rows.iterrows():
        problem = _contradiction(row, known)
        if problem:
            raise InputError(f"ledger: row {row['id']}: {problem}")
        known.add(row["id"])
    return rows


def _contradiction(row: pd.Series, known: set[str]) -> str | None:
    if not pd.isna(row["parent"]) and row["parent"] not in known:
        return f"parent {row['parent']} is no earlier row"
    measured = not row[["ratio", "ratio_lo", "ratio_hi"]].isna().any()
    if row["status"] == "keep" and not measured and not pd.isna(row["parent"]):
        return "kept without a measured ratio and its spread"
    if measured and not row["ratio_lo"] <= row["ratio"] <= row["ratio_hi"]:
        return f"ratio {row['ratio']} lies outside {row['ratio_lo']}..{row['ratio_hi']}"
    if row["status"] != "keep" and pd.isna(row["reason"]):
        return f"status {row['status']} needs a reason"
    return None


def read(path: Path) -> pd.DataFrame:
    """A checked ledger from its TSV."""
    return check(read_rows(path))


def append(path: Path, row: dict) -> pd.DataFrame:
    """Add one checked row to a ledger, whole or not at all; returns the whole ledger."""
    return append_rows(path, pd.DataFrame([row]).reindex(columns=list(COLUMNS)), check)


def best_so_far(rows: pd.DataFrame, workload: str) -> pd.DataFrame:
    """The tries on one workload (told by how its name begins), as speeds over the first of them.

    speed: product of the ratios back to the first version; lo and hi of the row's own interval;
    best: the greatest speed of a kept row so far. Rows without a ratio stand at 1 when they are a
    first version, and are left out when they crashed or were never measured.
    """
    speeds: dict[str, float] = {}
    tries: list[dict[str, object]] = []
    best = 0.0
    for row in rows[rows["workload"].str.startswith(workload, na=False)].itertuples():
        first = pd.isna(row.parent) or row.parent not in speeds
        if not first and pd.isna(row.ratio):
            continue
        parent = 1.0 if first else speeds[row.parent]
        ratios = [1.0] * 3 if first else [row.ratio, row.ratio_lo, row.ratio_hi]
        speed, lo, hi = (parent * ratio for ratio in ratios)
        speeds[row.id], best = speed, max(best, speed if row.status == "keep" else 0.0)
        tries.append(
            {"id": row.id, "workload": row.workload, "hypothesis": row.hypothesis}
            | {"status": row.status, "speed": speed, "lo": lo, "hi": hi, "best": best}
        )
    return pd.DataFrame(tries)

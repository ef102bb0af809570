"""Rows on their way into the published record, with the raw samples and the verdict behind them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd

from metainfer_lab.bench import results
from metainfer_lab.errors import InputError
from metainfer_lab.paths import DATA, RESULTS, ROOT, write_atomic


def publish(rows: pd.DataFrame, verdict: str, folder: Path = RESULTS) -> Path:
    """Append live rows of one measurement to the record; the path of the table.

    verdict: the JSON of the verdict whose hash the engine's rows carry. The rows become
    `recorded`, their raw file is copied beside the table. InputError when rows and verdict do not
    belong together.
    """
    judged = json.loads(verdict)
    ours = rows[rows["engine_tree"].notna()]
    if set(ours["engine_tree"]) != {judged["tree"]} or not judged["passed"]:
        raise InputError("verdict: of another tree, or not passed; verify and measure again")
    hashes = set(ours["verdict"])
    if len(hashes) != 1 or None in hashes:
        raise InputError("rows: they carry no verdict; pass its hash to bench(verdict=...)")
    write_atomic(folder / "verdicts" / f"{hashes.pop()}.json", verdict + "\n")
    table = rows.assign(origin="recorded", raw=[_keep(raw, folder) for raw in rows["raw"]])
    path = folder / "measured.csv"
    results.append(path, table)
    return path


def _keep(raw: str, folder: Path) -> str:
    """Copy a raw file of data/local beside the table; its new name, relative to the repository."""
    target = folder / "raw" / Path(raw).name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / raw, target)
    return target.relative_to(ROOT if target.is_relative_to(DATA) else folder.parent).as_posix()

"""Rows on their way into the published record, with the raw samples and the verdict behind them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd

from metainfer_lab.bench import results
from metainfer_lab.errors import InputError
from metainfer_lab.paths import DATA, RESULTS, ROOT, write_atomic


def publish(saved: Path, folder: Path = RESULTS) -> pd.DataFrame:
    """Append the rows of one measurement to the record; the rows as they stand there.

    saved: the CSV that `bench` wrote (here or on another machine), its raw samples and its verdict
    beside it. The rows become `recorded`. InputError when they do not belong together, or when the
    verdict is not of the kind of device that was measured.
    """
    if not saved.is_file():
        raise InputError(f"{saved}: no such file; bench says which it kept")
    rows = results.read(saved)
    beside = saved.with_suffix(".verdict.json")
    if not len(rows) or not beside.is_file():
        raise InputError(f"{saved.name}: no rows, or no {beside.name}; use bench(verdict=...)")
    verdict = beside.read_text()
    name = _checked(rows, json.loads(verdict))
    for raw in rows["raw"].unique():
        if not (saved.parent / Path(raw).name).is_file():
            raise InputError(f"{saved.name}: its raw samples {Path(raw).name} are not beside it")
    write_atomic(folder / "verdicts" / f"{name}.json", verdict)
    kept = [_keep(saved.parent / Path(raw).name, folder) for raw in rows["raw"]]
    rows = rows.assign(origin="recorded", raw=kept)
    results.append(folder / "measured.csv", rows)
    return rows


def _checked(rows: pd.DataFrame, judged: dict) -> str:
    """The hash of the verdict that the engine's rows carry."""
    ours = rows[rows["engine_tree"].notna()]
    if set(ours["engine_tree"]) != {judged["tree"]} or not judged["passed"]:
        raise InputError("verdict: of another tree, or not passed; verify and measure again")
    if ours["n_gpu"].max() > 0 and not judged["device"].startswith("cuda"):
        raise InputError("verdict: given on a CPU; rates on a GPU need one given on a GPU")
    hashes = set(ours["verdict"])
    if len(hashes) != 1 or None in hashes:
        raise InputError("rows: they carry no verdict; pass it to bench(verdict=...)")
    return hashes.pop()


def _keep(source: Path, folder: Path) -> str:
    """Copy a raw file beside the table; its new name, relative to the repository."""
    target = folder / "raw" / source.name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return target.relative_to(ROOT if target.is_relative_to(DATA) else folder.parent).as_posix()

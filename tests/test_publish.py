"""Rows enter the record with their verdict and their raw samples, or not at all."""

import json

import pandas as pd
import pytest

from metainfer_lab.bench import results
from metainfer_lab.bench.publish import publish
from metainfer_lab.errors import InputError
from metainfer_lab.paths import ENGINES, RESULTS, ROOT

MEASURED = results.read(RESULTS / "measured.csv")


def one_measurement() -> tuple[pd.DataFrame, str]:
    """The first published measurement, as it was when it was live."""
    rows = MEASURED[MEASURED["raw"] == MEASURED["raw"].iloc[0]].assign(origin="live")
    verdict = RESULTS / "verdicts" / f"{rows['verdict'].dropna().iloc[0]}.json"
    return rows, verdict.read_text().strip()


def test_rows_verdict_and_raw_go_together(tmp_path):
    rows, verdict = one_measurement()
    table = results.read(publish(rows, verdict, tmp_path))
    assert set(table["origin"]) == {"recorded"} and len(table) == len(rows)
    assert (tmp_path / "raw").is_dir() and len([*(tmp_path / "verdicts").iterdir()]) == 1


def test_a_verdict_of_another_tree_is_refused(tmp_path):
    rows, verdict = one_measurement()
    other = json.dumps(json.loads(verdict) | {"tree": "0" * 64})
    failed = json.dumps(json.loads(verdict) | {"passed": False})
    for wrong in (other, failed):
        with pytest.raises(InputError, match="verify and measure again"):
            publish(rows, wrong, tmp_path)
    with pytest.raises(InputError, match="carry no verdict"):
        publish(rows.assign(verdict=None), verdict, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_what_is_published_can_be_traced():
    for raw in MEASURED["raw"].unique():
        assert json.loads((ROOT / raw).read_text())
    for row in MEASURED[MEASURED["engine_tree"].notna()].itertuples():
        verdict = json.loads((RESULTS / "verdicts" / f"{row.verdict}.json").read_text())
        assert verdict["tree"] == row.engine_tree and verdict["passed"]
        assert (ENGINES / row.engine).is_dir()

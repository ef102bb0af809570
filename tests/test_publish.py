"""Rows enter the record with their verdict and their raw samples, or not at all."""

import json
import shutil
from pathlib import Path

import pytest

from metainfer_lab.bench import results
from metainfer_lab.bench.publish import publish
from metainfer_lab.errors import InputError
from metainfer_lab.paths import ENGINES, RESULTS, ROOT

MEASURED = results.read(RESULTS / "measured.csv")


def one_measurement(folder: Path, **changes: object) -> Path:
    """The first published measurement as `bench` left it on the machine that measured it."""
    rows = MEASURED[MEASURED["raw"] == MEASURED["raw"].iloc[0]].assign(origin="live", **changes)
    verdict = RESULTS / "verdicts" / f"{rows['verdict'].dropna().unique()[0]}.json"
    saved = folder / f"{Path(rows['raw'].iloc[0]).stem}.csv"
    rows.to_csv(saved, index=False)
    shutil.copyfile(ROOT / rows["raw"].iloc[0], saved.with_suffix(".json"))
    shutil.copyfile(verdict, saved.with_suffix(".verdict.json"))
    return saved


@pytest.fixture
def record(tmp_path) -> Path:
    (tmp_path / "record").mkdir()
    return tmp_path / "record"


def test_rows_verdict_and_raw_go_together(tmp_path, record):
    saved = one_measurement(tmp_path)
    rows = publish(saved, record)
    table = results.read(record / "measured.csv")
    assert set(table["origin"]) == {"recorded"} and len(table) == len(rows) == 9
    raw = [*(record / "raw").iterdir()]
    assert [path.read_text() for path in raw] == [saved.with_suffix(".json").read_text()]
    assert len([*(record / "verdicts").iterdir()]) == 1
    with pytest.raises(InputError, match="twice"):
        publish(saved, record)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tree": "0" * 64}, "verify and measure again"),
        ({"passed": False}, "verify and measure again"),
    ],
)
def test_a_verdict_of_another_tree_is_refused(tmp_path, record, change, says):
    saved = one_measurement(tmp_path)
    beside = saved.with_suffix(".verdict.json")
    beside.write_text(json.dumps(json.loads(beside.read_text()) | change))
    with pytest.raises(InputError, match=says):
        publish(saved, record)
    assert not [*record.iterdir()]


def test_rows_of_a_gpu_need_a_verdict_of_a_gpu(tmp_path, record):
    with pytest.raises(InputError, match="given on a CPU"):
        publish(one_measurement(tmp_path, n_gpu=1), record)


@pytest.mark.parametrize("kind", [".csv", ".json", ".verdict.json"])
def test_what_is_not_beside_the_rows_is_named(tmp_path, record, kind):
    saved = one_measurement(tmp_path)
    saved.with_suffix(kind).unlink()
    with pytest.raises(InputError, match=saved.with_suffix(kind).name):
        publish(saved, record)
    assert not [*record.iterdir()]


def test_what_is_published_can_be_traced():
    for raw in MEASURED["raw"].unique():
        assert json.loads((ROOT / raw).read_text())
    for row in MEASURED[MEASURED["engine_tree"].notna()].itertuples():
        verdict = json.loads((RESULTS / "verdicts" / f"{row.verdict}.json").read_text())
        assert verdict["tree"] == row.engine_tree and verdict["passed"]
        assert (ENGINES / row.engine).is_dir()

"""Figures say what they must: floor, spread, conditions; and their files are the same twice."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from test_results import CONDITIONS, row

from metainfer_lab import figures
from metainfer_lab.bench import results
from metainfer_lab.errors import InputError


@pytest.fixture
def rows() -> pd.DataFrame:
    bare = row(engine="products", p50=250.0)
    rival = row(engine="vllm-0.25.1", p50=190.0)
    reported = row(engine="sglang", origin="reported", p20=None, p80=None, raw="cookbook")
    return results.table([row(), rival, bare, reported])


def texts(figure) -> str:
    axes = figure.axes[0]
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    return "\n".join([*ticks, *(t.get_text() for t in axes.texts), figure.get_supxlabel()])


def test_single_stream_shows_floor_spread_and_conditions(rows):
    figure = figures.single_stream(rows)
    axes, said = figure.axes[0], texts(figure)
    heights = [bar.get_height() for bar in axes.patches]
    assert heights == [200.0, 190.0, 200.0]
    assert axes.get_ylim()[0] == 0 and "tok/s" in axes.get_ylabel()
    assert said.count("floor 281 (nominal)") == 3 and "matrix products alone 250" in said
    for fact in ("qwen3-8b", "H200", "1024 in", "5 runs", "seeded weights", "reported"):
        assert fact in said
    assert axes.patches[2].get_facecolor()[3] == 0, "a reported number is drawn hollow"


def test_an_engine_keeps_its_look_in_any_company(rows):
    alone = figures.single_stream(rows[rows["engine"] == "vllm-0.25.1"])
    beside = figures.single_stream(rows)
    assert alone.axes[0].patches[0].get_facecolor() == beside.axes[0].patches[1].get_facecolor()
    looks = {*figures.LOOKS.values(), figures.OURS}
    assert len({colour for colour, _ in looks}) == len(looks)


def test_operating_points_are_not_mixed(rows):
    other = results.table([row(prompt_len=128, output_len=64)])
    with pytest.raises(InputError, match="one operating point"):
        figures.single_stream(pd.concat([rows, other]))
    with pytest.raises(InputError, match="no decode_tok_s"):
        figures.single_stream(rows[rows["metric"] == "ttft_ms"])


def test_saved_files_are_byte_stable(rows, tmp_path):
    first = figures.save(figures.single_stream(rows), rows, "one", tmp_path / "a")
    second = figures.save(figures.single_stream(rows), rows, "one", tmp_path / "b")
    assert {path.suffix for path in first} == {".pdf", ".png", ".csv", ".json"}
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes(), one.name
    record = json.loads((tmp_path / "a/one.json").read_text())
    assert set(record["sha256"]) == {"pdf", "png", "csv"} and "matplotlib" in record["versions"]
    assert len(results.read(tmp_path / "a/one.csv")) == len(rows)


def test_timeline_marks_each_verdict():
    turns = pd.DataFrame(
        [(1, "model", None), (2, "model", False), (5, "model", True), (9, "decode", True)],
        columns=["turn", "phase", "passed"],
    )
    axes = figures.timeline(turns).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["model", "decode"]
    marks = [point for group in axes.collections for point in group.get_offsets().tolist()]
    assert sorted(marks) == [[2, 0], [5, 0], [9, 1]]


def test_caption_names_the_floor_kind_of_the_row():
    measured = results.pairs({**CONDITIONS, "floor": "measured"})
    figure = figures.single_stream(results.table([row(conditions=measured, p50=290.0)]))
    assert "floor 281 (measured)" in texts(figure)

"""Figures say what they must: floor, spread, conditions; and their files are the same twice."""

from __future__ import annotations

import json
import shutil

import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from test_results import CONDITIONS, row
from typer.testing import CliRunner

from metainfer_lab import figures, paths
from metainfer_lab.bench import ledger, results
from metainfer_lab.cli import app
from metainfer_lab.errors import InputError
from metainfer_lab.figures.style import LOOKS, OURS, STYLE


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
    looks = {*LOOKS.values(), OURS}
    assert len({colour for colour, *_ in looks}) == len(looks)
    assert len({marker for *_, marker in looks}) == len(looks)


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


def at(batch: int, tok_s: float, **changes: object) -> list[dict]:
    """Rate and time of one operating point that agree with each other."""
    floor = {"floor": 300.0 * batch, "batch": batch}
    time = 1e3 * batch / tok_s
    spread = {"p20": time, "p50": time, "p80": time}
    ms = {**changes, **floor, **spread, "metric": "tpot_ms", "unit": "ms", "floor": 1e3 / 300}
    return [row(**{**changes, **floor, "p50": tok_s}), row(**ms)]


def test_throughput_joins_batches_and_draws_reported_ones_hollow():
    reported = {"engine": "vllm-0.25.1", "origin": "reported", "raw": "cookbook"}
    points = [at(1, 200), at(8, 1500), at(1, 190, **reported), at(8, 1400, **reported)]
    rows = results.table([row for pair in points for row in pair])
    axes = figures.throughput(rows).axes[0]
    ours, theirs, floor = axes.lines
    assert ours.get_xdata().tolist() == pytest.approx([200, 1500 / 8])
    assert ours.get_ydata().tolist() == [200, 1500]
    assert theirs.get_markerfacecolor() == "none" and ours.get_markerfacecolor() != "none"
    assert floor.get_ydata().tolist() == [300, 2400] and floor.get_label() == "floor"
    assert sorted(text.get_text() for text in axes.texts) == ["1", "1", "8", "8"]
    with pytest.raises(InputError, match="one model, machine"):
        figures.throughput(pd.concat([rows, rows.assign(gpu="B200")]))


def test_tries_show_what_was_thrown_away():
    def tried(name: str, parent: str | None, ratio: float | None, status: str) -> dict:
        spread = {"ratio": ratio, "ratio_lo": ratio, "ratio_hi": ratio}
        reason = None if status == "keep" else "slower"
        return {"id": name, "parent": parent, "status": status, "reason": reason, **spread} | {
            "hypothesis": "x", "workload": "decode step, 1 stream"
        }  # fmt: skip

    rows = [tried("a", None, None, "keep"), tried("b", "a", 1.5, "keep")]
    rows += [tried("c", "b", 0.8, "discard"), tried("d", "b", 1.1, "keep")]
    other = tried("e", None, None, "keep") | {"workload": "first token"}
    table = ledger.check(pd.DataFrame([*rows, other]).reindex(columns=list(ledger.COLUMNS)))
    tries = ledger.best_so_far(table, "decode step")
    assert tries["speed"].tolist() == pytest.approx([1, 1.5, 1.2, 1.65])
    assert tries["best"].tolist() == pytest.approx([1, 1.5, 1.5, 1.65])
    axes = figures.running_best(tries).axes[0]
    kept, thrown = [group for group in axes.collections if isinstance(group, PathCollection)]
    assert len(kept.get_offsets()) == 3 and len(thrown.get_offsets()) == 1
    assert len(thrown.get_facecolor()) == 0, "what was thrown away is hollow"


def test_step_shares_add_up_to_the_step():
    parts = [("a", "weights", 3.0), ("a", "cache", 0.5), ("a", "beyond the floor", 1.5)]
    figure = figures.step_shares(pd.DataFrame(parts, columns=["engine", "part", "ms"]))
    axes = figure.axes[0]
    assert [bar.get_width() for bar in axes.patches] == [3, 0.5, 1.5]
    assert axes.patches[2].get_x() == 3.5 and axes.patches[2].get_hatch()
    assert [text.get_text() for text in axes.texts] == ["60%", "10%", "30%"]


def as_published(name: str) -> pytest.param:
    """A published figure beside the PNG in figures/, within what rendering may differ by."""
    looks = {"baseline_dir": "../figures", "style": str(STYLE), "savefig_kwargs": {"dpi": 200}}
    marks = pytest.mark.mpl_image_compare(filename=f"{name}.png", tolerance=2, **looks)
    return pytest.param(name, marks=marks, id=name)


@pytest.mark.parametrize("name", [as_published(name) for name in figures.PUBLISHED])
def test_published_figures_look_as_they_did(name):
    """Beyond `check`, which compares bytes: with another matplotlib too."""
    published = figures.PUBLISHED[name]
    return published.draw(published.table())


def test_published_figures_are_what_the_record_draws():
    assert figures.check() == []


@pytest.mark.parametrize("kind", ["csv", "png", "pdf"])
def test_a_changed_or_missing_file_is_found(tmp_path, kind):
    name = "floors_h200"
    for path in paths.FIGURES.glob(f"{name}.*"):
        shutil.copyfile(path, tmp_path / path.name)
    assert figures.check([name], tmp_path) == []
    target = tmp_path / f"{name}.{kind}"
    changed = target.read_bytes().replace(b"1024", b"1025") if kind == "csv" else b"other"
    target.write_bytes(changed)
    problems = figures.check([name], tmp_path)
    assert len(problems) == 1 and problems[0].startswith(name)
    target.unlink()
    assert f"not published as {kind}" in figures.check([name], tmp_path)[0]
    with pytest.raises(InputError, match="no 'nothing'"):
        figures.check(["nothing"])


def test_images_are_not_compared_across_matplotlib_versions(tmp_path):
    name = "floors_h200"
    for path in paths.FIGURES.glob(f"{name}.*"):
        shutil.copyfile(path, tmp_path / path.name)
    record = json.loads((tmp_path / f"{name}.json").read_text())
    record["versions"]["matplotlib"] = "3.0"
    (tmp_path / f"{name}.json").write_text(json.dumps(record))
    (tmp_path / f"{name}.png").write_bytes(b"other")
    assert figures.check([name], tmp_path) == []


def test_provenance_names_data_and_function():
    record = json.loads((paths.FIGURES / "floors_h200.json").read_text())
    assert record["drawn_by"]["function"] == "metainfer_lab.figures.bounds.floors_by_batch"
    assert "data/hardware/h200.yaml" in record["data"] and len(record["data"]) == 4
    assert not {"commit", "time", "timestamp"} & set(record)


def test_reported_rows_of_a_file_are_the_file():
    """Numbers that were copied from a table of measurements are that table's."""
    reported = results.read(paths.RESULTS / "reported.csv")
    for raw in reported["raw"][reported["raw"].str.startswith("data/")].unique():
        file = pd.read_csv(paths.ROOT / raw)
        for one in reported[reported["raw"] == raw].itertuples():
            mode = "in-process" if one.engine.endswith("in-process") else "default"
            point = {"model": one.model, "tp": one.tp, "process_mode": mode}
            point |= {"batch": one.batch, "prompt_len": one.prompt_len}
            source = file[(file[list(point)] == pd.Series(point)).all(axis=1)].iloc[0]
            assert one.p50 == source["prefill_ms" if one.metric == "ttft_ms" else one.metric]


def test_the_command_says_no_by_its_exit_code(monkeypatch):
    def asked(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["figures", *arguments])
        return done.exit_code, done.output

    assert asked("floors_h200", "--check") == (
        0,
        "the published figures are what the record draws\n",
    )
    monkeypatch.setattr(figures, "check", lambda names: ["one: differs"])
    assert asked("--check") == (1, "one: differs\n")

"""Rows that break physics, lack a condition or mix operating points never enter a table."""

from __future__ import annotations

import threading

import pandas as pd
import pytest

from metainfer_lab import paths
from metainfer_lab.bench import ledger, results
from metainfer_lab.errors import InputError

CONDITIONS = {"timing": "host clock", "decoding": "greedy, ignore_eos", "floor": "nominal"}


def row(**changes: object) -> dict:
    p50 = changes.get("p50", 200.0)
    return {
        "origin": "live",
        "engine": "qwen3-8b-bf16-h200",
        "model": "qwen3-8b",
        "weights": "seeded",
        "precision": "bf16",
        "tp": 1,
        "gpu": "H200",
        "n_gpu": 1,
        "batch": 1,
        "prompt_len": 1024,
        "output_len": 128,
        "metric": "decode_tok_s",
        "unit": "tok/s",
        "n": 5,
        "p20": p50 * 0.99,
        "p50": p50,
        "p80": p50 * 1.01,
        "floor": 281.0,
        "conditions": results.pairs(CONDITIONS),
        "versions": "torch=2.11.0",
        "raw": "data/local/bench/x.json",
        "timestamp": "2026-11-30T12:00:00Z",
        **changes,
    }


def tpot(ms: float, **changes: object) -> dict:
    return row(metric="tpot_ms", unit="ms", p20=ms, p50=ms, p80=ms, floor=3.56, **changes)


def test_good_rows_survive_a_round_trip(tmp_path):
    path = tmp_path / "rows.csv"
    rows = results.table([row(), tpot(5.0)])
    results.append(path, rows)
    whole = results.append(path, results.table([row(timestamp="2026-11-30T13:00:00Z")]))
    assert len(whole) == 3
    pd.testing.assert_frame_equal(results.read(path), whole)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"p50": 300.0}, "beyond the floor"),
        ({"p80": 281.5}, "beyond the floor"),
        ({"unit": "ms"}, "is in tok/s"),
        ({"p20": 201.0}, "out of order"),
        ({"conditions": "timing=x; floor=nominal"}, "conditions: decoding"),
        ({"conditions": results.pairs({**CONDITIONS, "floor": "hoped"})}, "'hoped'"),
        ({"prompt_len": None}, "prompt_len"),
        ({"versions": None}, "versions"),
        ({"origin": "rumour"}, "origin"),
        ({"metric": "goodness"}, "metric"),
        ({"p50": -1.0}, "greater_than"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_bad_row_is_refused_with_its_reason(changes, says):
    rows = pd.DataFrame([row(**changes)])
    rows = rows.reindex(columns=[*results.COLUMNS, *(c for c in rows if c not in results.COLUMNS)])
    with pytest.raises(InputError, match=says):
        results.check(rows)


def test_times_are_held_to_the_floor_from_below():
    with pytest.raises(InputError, match="beyond the floor"):
        results.table([tpot(3.5)])


@pytest.mark.parametrize("kind", ["measured", "cache-resident"])
def test_floor_that_is_no_bound_refuses_nothing(kind):
    conditions = results.pairs({**CONDITIONS, "floor": kind})
    assert len(results.table([row(p50=300.0, conditions=conditions)])) == 1


def test_mixed_operating_points_are_refused():
    with pytest.raises(InputError, match="mix operating points"):
        results.table([row(), tpot(10.0)])
    with pytest.raises(InputError, match="one metric twice"):
        results.table([row(), row(p50=150.0)])


def test_streams_that_wait_for_prompts_mix_nothing():
    """32 streams of 1,024 tokens on an H200: 5,665 tok/s while all decode, 8.65 ms a token."""
    point, wide = {"batch": 32}, {"floor": 9000.0}
    rows = [row(p50=5665.0, **point, **wide), tpot(8.65, **point)]
    with pytest.raises(InputError, match="mix operating points"):
        results.table(rows)
    assert len(results.table([*rows, row(p50=2237.0, metric="output_tok_s", **point, **wide)])) == 3
    with pytest.raises(InputError, match="mix operating points"):
        results.table([*rows, row(p50=5237.0, metric="output_tok_s", **point, **wide)])


def test_reported_number_needs_only_its_source():
    reported = row(origin="reported", n=None, p20=None, p80=None, conditions="", versions=None)
    assert len(results.table([reported])) == 1
    with pytest.raises(InputError, match="source"):
        results.table([{**reported, "raw": ""}])


def test_published_reported_numbers_pass():
    rows = results.read(paths.RESULTS / "reported.csv")
    assert (rows["origin"] == "reported").all() and len(rows) > 5


def test_parallel_writers_lose_nothing(tmp_path):
    path = tmp_path / "rows.csv"

    def write(hour: int) -> None:
        results.append(path, results.table([row(timestamp=f"2026-11-30T{hour:02}:00:00Z")]))

    threads = [threading.Thread(target=write, args=(hour,)) for hour in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.read(path)["timestamp"].nunique() == 8


def test_rows_of_another_tree_or_gate_are_an_earlier_version(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "ENGINES", tmp_path)
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    folder, verdict = tmp_path / "mine", tmp_path / "verdicts" / "v1.json"
    for made in (folder, verdict.parent):
        made.mkdir()
    (folder / "engine.json").write_text("{}")
    verdict.write_text('{"gates": [{"gate": "logits", "version": 2}]}')
    tree = paths.tree_hash(folder)
    rows = results.table([row(engine="mine", engine_tree=tree, verdict="v1"), row(engine="vllm")])

    def versions(**gates: int) -> list[str]:
        return [*results.with_currency(rows, gates)["version"]]

    assert versions(logits=2, drift=9) == ["current", ""]
    assert versions(logits=3) == ["earlier version", ""], "a gate has changed"
    verdict.rename(tmp_path / "gone")
    assert versions(logits=2) == ["earlier version", ""], "no record of the verdict"
    (tmp_path / "gone").rename(verdict)
    (folder / "step.py").write_text("x = 1\n")
    assert versions(logits=2) == ["earlier version", ""], "another tree"


def entry(**changes: object) -> dict:
    first = {"id": "o1", "hypothesis": "the baseline", "status": "keep", "seconds": 1.0}
    return first | changes


def test_ledger_grows_and_refuses_contradictions(tmp_path):
    path = tmp_path / "ledger.tsv"
    ledger.append(path, entry())
    better = {"parent": "o1", "ratio": 1.05, "ratio_lo": 1.04, "ratio_hi": 1.06}
    ledger.append(path, entry(id="o2", **better))
    for wrong, says in [
        (entry(id="o2", **better), "o2"),
        (entry(id="o3", parent="o9"), "no earlier row"),
        (entry(id="o3", parent="o1"), "kept without"),
        (entry(id="o3", parent="o1", status="discard"), "needs a reason"),
        (entry(id="o3", **{**better, "ratio": 2.0}), "outside"),
        (entry(id="o3", status="lucky"), "status"),
    ]:
        with pytest.raises(InputError, match=says):
            ledger.append(path, wrong)
    assert list(ledger.read(path)["id"]) == ["o1", "o2"]

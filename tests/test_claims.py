"""Claims are judged by rows: the same case, another case, no case; none is judged by eye."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from test_results import row

from metainfer_lab.bench import claims, engine_logs, results
from metainfer_lab.errors import InputError
from metainfer_lab.paths import RUNS

CASE = {"model": "qwen3-8b", "metric": "decode_tok_s", "batch": 1, "gpu": "H200", "tp": 1}
RATE = {"id": "r", "claim": "fast", "source": "s", "conditions": "c", "unit": "tok/s"}
ENGINES = {"qwen3-8b-bf16-h200": 3000}


def judge(claim: dict, *rows: dict, engines=ENGINES, generated=()) -> claims.Judged:
    table = results.table([*rows]) if rows else results.table([])
    return claims.judge([claims.Claim(**RATE | claim)], table, engines, [*generated])[0]


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(200, "reproduced"), (195, "reproduced"), (150, "exceeded"), (280, "not reproduced")],
)
def test_a_rate_of_the_same_case(value, verdict):
    found = judge({"kind": "rate", "value": value, "case": CASE}, row(p50=200.0))
    assert found.verdict == verdict and "200.0 tok/s" in found.ours


def test_another_case_stands_beside_it_and_says_what_differs():
    other = CASE | {"gpu": "A800", "tp": 4}
    found = judge({"kind": "rate", "value": 62, "case": other}, row(p50=200.0))
    assert found.verdict == "not comparable"
    assert found.why == "gpu H200 here, A800 there; tp 1 here, 4 there"
    assert judge({"kind": "rate", "value": 62, "case": other}).verdict == "not tested"


def test_a_ratio_needs_the_rival_in_the_same_run():
    claim = {"kind": "ratio", "value": 1.41, "unit": "x", "over": "vllm", "case": CASE}
    theirs = {"engine": "vllm-0.25.1"}
    beside = judge(claim, row(p50=200.0), row(p50=100.0, **theirs))
    assert beside.verdict == "exceeded" and beside.ours.startswith("2.00 x vllm")
    alone = judge(claim, row(p50=200.0), row(p50=100.0, raw="other.json", **theirs))
    assert alone.verdict == "not comparable" and "did not run beside it" in alone.why
    assert "2.00 x the vllm of the claim" in alone.ours
    speculating = judge(
        claim | {"case": CASE | {"speculation": "on"}}, row(p50=200.0), row(p50=100.0, **theirs)
    )
    assert speculating.verdict == "not comparable"
    assert "speculation off here, on there" in speculating.why


def test_a_ratio_of_times_turns_round():
    times = {"metric": "ttft_ms", "unit": "ms", "floor": 1.0}
    case = {"kind": "ratio", "value": 2.0, "over": "vllm", "case": CASE | {"metric": "ttft_ms"}}
    found = judge(case, row(p50=10.0, **times), row(p50=20.0, engine="vllm-1", **times))
    assert found.verdict == "reproduced" and found.ours.startswith("2.00 x")


def test_code_and_knowledge():
    code = {"kind": "less_code", "value": 99, "unit": "%", "lines_of": "vLLM"}
    assert judge(code | {"lines": 800_000}).verdict == "reproduced"
    assert judge(code | {"lines": 100_000}).verdict == "not reproduced"
    stricter = judge(code | {"lines": 800_000, "modules": {"qwen3-8b-bf16-h200": 12_000}})
    assert (
        "against its modules on the same path (12,000)" in stricter.why and "75 %" in stricter.why
    )
    knowledge = {"kind": "knowledge_only", "unit": "engines"}
    assert judge(knowledge).verdict == "not tested"
    assert judge(knowledge, generated=["a-r1"]).ours == "1 run(s) of 1 spec(s)"
    assert judge(knowledge, generated=["a-r1", "a-r2", "b-r1"]).ours == "3 run(s) of 2 spec(s)"


def test_the_claims_of_the_record_are_all_there():
    loaded = claims.load()
    assert {claim.value for claim in loaded} >= {99, 62.0, 60.2, 1.41, None, 1.90, 2.33, 1.71}
    assert len({claim.id for claim in loaded}) == len(loaded)
    with pytest.raises(ValidationError):
        claims.Claim(**RATE, kind="rate", colour="red")


LOG = """1 stream, prompt 1024, 128 new: ttft ms p20/50/80 22.0 22.5 23.0; tpot ms 4.0 4.1 4.2 ->
TP1 warm 1 stream, prompt 1024, 128 new, n=1: ttft ms 99.0 99.0 99.0; tpot ms 9.0 9.0 9.0 -> 111
TP1 32 streams, prompt 1024, 160 new {} n=5: decode tok/s 5000 5500 6000; incl. prefill 2506
32 streams, prompt 128, 64 new {'temperature': 0.8}: decode tok/s p20/50/80 4000 4000 4000; output
"""
STEPS = """
[   7.9] STEP rows 8: 3600.0 us (p20 3500.0 p80 3700.0) = 2138 tok/s touched/layer 57.2
[  12.5] TTFT 128: 17.7 ms ['90.0', '17.0', '18.0', '19.0']
"""


@pytest.fixture
def logged(tmp_path, monkeypatch):
    """A run whose ledger keeps the logs 2 and 10, and threw away 11."""
    monkeypatch.setattr(engine_logs.paths, "RUNS", tmp_path)
    monkeypatch.setattr(engine_logs.paths, "ROOT", tmp_path)
    folder = tmp_path / "run"
    (folder / "raw").mkdir(parents=True)
    lines = [
        "id\tstatus\traw",
        "1-1\tkeep\traw/1.txt",
        "2-1\tkeep\traw/2.txt to raw/10.txt",
        "3-1\tdiscard\traw/11.txt",
    ]
    (folder / "ledger.tsv").write_text("\n".join(lines))
    for name, text in {"1": "", "2": STEPS, "10": STEPS, "11": STEPS}.items():
        (folder / "raw" / f"{name}.txt").write_text(text)
    return folder


def test_the_log_of_the_last_kept_try_speaks_or_the_last_with_requests(logged):
    def speaking() -> list[str]:
        return [path.name for path in engine_logs.speaking_logs(logged)]

    assert speaking() == ["10.txt"]
    (logged / "raw" / "10.txt").write_text(STEPS.replace("TTFT", "other"))
    assert {*speaking()} == {"2.txt", "10.txt"}, (
        "first tokens are the last kept log's that has them"
    )
    for name in ("9-b.txt", "3.txt"):
        (logged / "raw" / name).write_text(LOG)
    assert speaking() == ["9-b.txt"]
    for path in (logged / "raw").iterdir():
        path.write_text("nothing")
    with pytest.raises(InputError, match="no log in raw"):
        engine_logs.read_run("run", "qwen3-8b-bf16-h200")


def test_logged_requests_are_reported_rows_with_floors(logged):
    (logged / "raw" / "12.txt").write_text(LOG)
    rows = engine_logs.read_run("run", "qwen3-8b-bf16-h200").set_index(["batch", "metric"])
    assert set(rows["origin"]) == {"reported"} and set(rows["weights"]) == {"seeded"}
    assert rows.loc[(1, "tpot_ms"), "p50"] == 4.1, "the warm-up is no reading"
    assert rows.loc[(1, "decode_tok_s"), "p80"] == pytest.approx(250)
    assert rows.loc[(32, "tpot_ms"), "p20"] == pytest.approx(32e3 / 6000)
    assert rows.loc[(32, "decode_tok_s"), "n"] == 5
    assert len(rows) == 5 and (rows["floor"] > 0).all(), "a sampled run is no greedy row"


def test_logged_steps_are_reported_rows_too(logged):
    rows = engine_logs.read_run("run", "qwen3-8b-bf16-h200").set_index("metric")
    assert rows.loc["tpot_ms", ["p50", "experts_touched"]].tolist() == [3.6, 57.2]
    assert rows.loc["ttft_ms", ["p50", "prompt_len"]].tolist() == [18, 128]
    steps = engine_logs.step_times(logged / "raw" / "2.txt")
    assert steps.loc[8].tolist() == [3500, 3600, 3700]
    assert engine_logs.step_times(logged / "raw" / "1.txt").empty


def test_a_kept_pair_speaks_for_its_own_point_alone(logged):
    pairs = [
        "[ 1.0] PAIR ttft 128 before: 17900.0 us (p20 17800.0, p80 18000.0) n=28",
        "[ 1.0] PAIR ttft 128 new: 9000.0 us (p20 8900.0, p80 9100.0) n=28",
        "[ 1.0] PAIR step 8 new: 3580.0 us (p20 3570.0, p80 3590.0) n=44",
    ]
    (logged / "raw" / "12.txt").write_text("\n".join(pairs))
    with (logged / "ledger.tsv").open("a") as ledger:
        ledger.write("\n4-ttft-128\tkeep\traw/12.txt\n4-8\tdiscard\traw/12.txt")
    rows = engine_logs.read_run("run", "qwen3-8b-bf16-h200").set_index("metric")
    assert rows.loc["ttft_ms", ["p20", "p50", "p80", "n"]].tolist() == [8.9, 9.0, 9.1, 28]
    assert rows.loc["tpot_ms", "p50"] == 3.6, "the pair of a discarded row says nothing"
    with (logged / "ledger.tsv").open("a") as ledger:
        ledger.write("\n5-8\tkeep\traw/12.txt")
    rows = engine_logs.read_run("run", "qwen3-8b-bf16-h200").set_index("metric")
    assert rows.loc["tpot_ms", ["p50", "experts_touched"]].tolist() == [3.58, 57.2]


def test_the_runs_of_the_record_can_be_read():
    runs = {"qwen3.6-35b-a3b-nvfp4-h200": "nvfp4-mix", "qwen3-8b-bf16-h200": "bf16"}
    for spec, precision in runs.items():
        rows = engine_logs.read_run(f"{spec}-a1", spec)
        assert set(rows["precision"]) == {precision} and {1, 32} <= set(rows["batch"])
        assert (RUNS.parent.parent / rows["raw"].iloc[0]).is_file()

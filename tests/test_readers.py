"""Files of vLLM's, SGLang's and TensorRT-LLM's benchmarks become rows, or are refused by field."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from metainfer_lab.bench import results
from metainfer_lab.bench.readers import Setting, read
from metainfer_lab.errors import InputError

SETTING = Setting(
    engine="vllm-0.25.1", model="qwen3-8b", gpu="H200", precision="bf16", tp=1, n_gpu=1
)


def serve(batch: int = 4, **changes: object) -> dict:
    """What `vllm bench serve --save-result` writes, with consistent numbers."""
    return {
        "date": "20261130-160000",
        "backend": "vllm",
        "num_prompts": 40,
        "request_rate": "inf",
        "max_concurrency": batch,
        "duration": 20.0,
        "completed": 40,
        "failed": 0,
        "total_input_tokens": 40 * 1024,
        "total_output_tokens": 40 * 128,
        "request_throughput": 2.0,
        "output_throughput": 256.0,
        "total_token_throughput": 2304.0,
        "median_ttft_ms": 41.0,
        "median_tpot_ms": 4.5,
        "median_itl_ms": 4.4,
        **changes,
    }


def sglang(**changes: object) -> dict:
    record = serve(8, total_throughput=2304.0, dataset_name="random", accept_length=1.0)
    left_out = ("num_prompts", "total_token_throughput", "failed")
    return {k: v for k, v in record.items() if k not in left_out} | changes


def trtllm(**streaming: object) -> dict:
    return {
        "engine": {"model": "Qwen/Qwen3-8B", "version": "1.2.0", "backend": "Pytorch"},
        "world_info": {"tp_size": 1, "max_batch_size": 32},
        "request_info": {
            "num_requests": 64,
            "avg_num_concurrent_requests": 31.7,
            "avg_input_length": 1024.0,
            "avg_output_length": 128.0,
        },
        "performance": {"total_latency_ms": 4096.0, "system_output_throughput_tok_s": 2000.0},
        "streaming_metrics": {"avg_ttft_ms": 210.0, "avg_tpot_ms": 14.0, **streaming},
    }


def rows_of(tmp_path: Path, record: object, setting: Setting = SETTING):
    path = tmp_path / "result.json"
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    return read(path, setting).set_index("metric")


def test_vllm_serve(tmp_path):
    rows = rows_of(tmp_path, serve())
    assert set(rows.index) == {"output_tok_s", "ttft_ms", "tpot_ms"}
    assert rows.loc["tpot_ms", "p50"] == 4.5 and rows.loc["output_tok_s", "p50"] == 256.0
    assert (rows["origin"] == "reported").all() and rows["p20"].isna().all()
    assert rows[["batch", "prompt_len", "output_len"]].drop_duplicates().values.tolist() == [
        [4, 1024, 128]
    ]
    assert rows.loc["ttft_ms", "n"] == 40


def test_one_stream_has_a_decode_rate(tmp_path):
    rows = rows_of(tmp_path, serve(1, p20_tpot_ms=4.0, p80_tpot_ms=5.0))
    found = rows.loc["decode_tok_s", ["p20", "p50", "p80"]].tolist()
    assert found == pytest.approx([200.0, 1000 / 4.5, 250.0])


def test_details_give_the_spread(tmp_path):
    draw = random.Random()
    ttfts = [draw.uniform(0.030, 0.052) for _ in range(41)]
    record = serve(ttfts=ttfts, median_ttft_ms=1e3 * float(np.median(ttfts)))
    row = rows_of(tmp_path, record).loc["ttft_ms"]
    assert row["p20"] == pytest.approx(1e3 * np.quantile(ttfts, 0.2))
    assert row["p20"] < row["p50"] < row["p80"]


def test_older_and_richer_files(tmp_path):
    record = serve(spec_decode_acceptance_length=2.71, request_goodput=None, rtfx=0.0)
    del record["failed"]
    rows = rows_of(tmp_path, json.dumps(record) + "\n" + json.dumps(serve(16)) + "\n")
    assert sorted(set(rows["batch"])) == [4, 16]
    stated = [results.unpair(text) for text in rows["conditions"]]
    assert sum("speculation" in one for one in stated) == 3
    assert set(rows["raw"]) == {"result.json#0", "result.json#1"}


def test_tpot_of_single_tokens_is_no_measurement(tmp_path):
    record = serve(median_tpot_ms=0.0, total_output_tokens=40, output_throughput=2.0)
    assert set(rows_of(tmp_path, record).index) == {"output_tok_s", "ttft_ms"}


def test_vllm_latency_is_of_a_whole_batch(tmp_path):
    draw = random.Random()
    times = [draw.uniform(0.55, 0.65) for _ in range(30)]
    record = {"avg_latency": float(np.mean(times)), "latencies": times, "percentiles": {"50": 0.6}}
    with pytest.raises(InputError, match="batch"):
        rows_of(tmp_path, record)
    setting = SETTING.model_copy(update={"batch": 8, "prompt_len": 32, "output_len": 128})
    row = rows_of(tmp_path, record, setting).loc["output_tok_s"]
    assert row["p50"] == pytest.approx(8 * 128 / np.median(times), rel=1e-3)
    assert row["n"] == 30 and row["p20"] < row["p80"]
    with pytest.raises(InputError, match="avg_latency"):  # milliseconds
        rows_of(tmp_path, record | {"avg_latency": 600.0}, setting)


def test_sglang(tmp_path):
    rows = rows_of(tmp_path, sglang())
    assert set(rows["batch"]) == {8} and rows.loc["ttft_ms", "p50"] == 41.0
    assert "sglang" in results.unpair(rows.loc["ttft_ms", "conditions"])["timing"]
    with pytest.raises(InputError, match="batch"):
        rows_of(tmp_path, sglang(max_concurrency=None))


def test_trtllm(tmp_path):
    rows = rows_of(tmp_path, trtllm(ttft_percentiles={"average": 210.0, "p50": 200.0}))
    assert rows.loc["ttft_ms", "p50"] == 200.0 and rows.loc["tpot_ms", "p50"] == 14.0
    assert set(rows["batch"]) == {32}
    with pytest.raises(InputError, match="ttft_percentiles"):  # nanoseconds
        rows_of(tmp_path, trtllm(ttft_percentiles={"average": 2.1e8, "p50": 2.0e8}))


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (serve(output_throughput=0.256), "total_output_tokens / duration"),
        (serve(ttfts=[41.0] * 40), "ttfts"),  # milliseconds where the tool writes seconds
        (serve(median_ttft_ms="41"), "not a number"),
        (serve(completed=0), "completed is 0"),
        ({k: v for k, v in serve().items() if k != "duration"}, "duration is missing"),
        ({"tokens": 1}, "written by none of"),
        ("not json", "neither JSON"),
        ("[]", "no result objects"),
    ],
)
def test_what_cannot_be_trusted_is_refused(tmp_path, record, says):
    with pytest.raises(InputError, match=says):
        rows_of(tmp_path, record)


def test_a_setting_that_contradicts_the_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="prompt_len"):
        rows_of(tmp_path, serve(), SETTING.model_copy(update={"prompt_len": 512}))

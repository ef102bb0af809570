"""Results of other tools as rows of the schema: vLLM's, SGLang's and TensorRT-LLM's benchmarks.

Their files say what was measured but not on what machine or in what precision; `Setting` adds
that. Each number is checked against the others of its file, so that seconds are never taken for
milliseconds. What a file does not hold stays empty; nothing is guessed. The rows are *reported*:
another tool's clock, beside ours but never mixed with them.

Definitions (vLLM, `vllm bench serve`): TTFT is the first chunk after the request was sent; TPOT of
a request is (end to end - TTFT) / (output tokens - 1); output throughput counts every output token
over the whole duration, prefill included.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from metainfer_lab.bench import results
from metainfer_lab.errors import InputError

AGREE = 0.02  # relative difference that rounding and averaging may leave inside one file
QUANTILES = {"p20": 0.2, "p50": 0.5, "p80": 0.8}
Record = dict[str, Any]


class Setting(BaseModel):
    """What the files leave out. batch, prompt_len and output_len only where they hold none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str = Field(description="name and version, as vllm-0.25.1")
    model: str
    gpu: str
    weights: str | None = None
    precision: str | None = None
    tp: int | None = None
    n_gpu: int | None = None
    batch: int | None = None
    prompt_len: int | None = None
    output_len: int | None = None
    conditions: dict[str, str] = {}


def read(path: Path, setting: Setting) -> pd.DataFrame:
    """Rows of a result file, of whichever of the tools it is (JSON, or one object a line).

    InputError names the file and the field that is missing, contradicts another, or is in another
    unit than the tool's.
    """
    stamp = datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    rows = []
    for number, record in enumerate(_records(path)):
        tool = _Reading(path, record, setting)
        rows += [
            tool.row(raw=f"{path.name}#{number}", timestamp=stamp, **fields)
            for fields in READERS[_tool_of(path, record)](tool)
        ]
    return results.table(rows)


def _records(path: Path) -> list[Record]:
    """The objects of a file: one, a list of them, or one a line."""
    text = path.read_text()
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        try:
            whole = [json.loads(line) for line in text.splitlines() if line.strip()]
        except json.JSONDecodeError as error:
            raise InputError(f"{path.name}: neither JSON nor JSON lines ({error})") from None
    records = whole if isinstance(whole, list) else [whole]
    if not records or not all(isinstance(record, dict) for record in records):
        raise InputError(f"{path.name}: holds no result objects; give the file a benchmark wrote")
    return records


def _tool_of(path: Path, record: Record) -> str:
    """Which tool wrote a record, by the fields that only it has."""
    marks = {
        "trtllm-bench": {"performance", "request_info"},
        "vllm bench latency": {"avg_latency", "latencies", "percentiles"},
        "sglang bench_serving": {"output_throughput", "total_throughput"},
        "vllm bench serve": {"output_throughput", "num_prompts"},
    }
    for tool, fields in marks.items():
        if fields <= record.keys():
            return tool
    raise InputError(f"{path.name}: written by none of {', '.join(marks)}")


class _Reading:
    """One record of a file, its fields asked for by name."""

    def __init__(self, path: Path, record: Record, setting: Setting) -> None:
        self.path, self.record, self.setting = path, record, setting

    def number(self, name: str, default: float | None = None) -> float | None:
        """A field (`performance.x` for a nested one) as a number; older files may lack it."""
        value: Any = self.record
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{self.path.name}: {name} is {value!r}, not a number")
        return float(value)

    def need(self, name: str) -> float:
        """A field that every version of the tool writes."""
        value = self.number(name)
        if value is None:
            raise InputError(f"{self.path.name}: {name} is missing")
        return value

    def point(self, name: str, found: float | None) -> int:
        """batch, prompt_len or output_len: from the file, else from the setting."""
        stated = getattr(self.setting, name)
        if found is None and stated is None:
            raise InputError(f"{self.path.name}: does not hold {name}; state it in the setting")
        if found is not None and stated is not None:
            self.agree(name, found, "the setting", stated)
        return round(found) if found is not None else stated

    def agree(self, name: str, value: float, other: str, expected: float) -> None:
        """Refuse a number that another of the same file contradicts."""
        if abs(value - expected) > AGREE * max(abs(value), abs(expected)):
            raise InputError(
                f"{self.path.name}: {name} is {value:.6g}, but {other} says {expected:.6g}; "
                "a unit or a field is not what this reader knows"
            )

    def row(self, conditions: dict[str, object], **fields: object) -> Record:
        """A row of the schema; fields of the setting fill what the file does not say."""
        stated = self.setting.model_dump(
            include={"engine", "model", "gpu", "weights", "precision", "tp", "n_gpu"}
        )
        text = results.pairs({**conditions, **self.setting.conditions})
        unit = results.METRICS[fields["metric"]]
        return {**stated, "origin": "reported", "unit": unit, "conditions": text, **fields}


def _serving(tool: _Reading, name: str, speculation: float | None) -> Iterator[Record]:
    """Rows of an online benchmark: what vLLM's and SGLang's files have in common."""
    completed, duration = tool.need("completed"), tool.need("duration")
    if not completed:
        raise InputError(f"{tool.path.name}: completed is 0; nothing was measured")
    written, rate = tool.need("total_output_tokens"), tool.need("output_throughput")
    tool.agree("output_throughput", rate, "total_output_tokens / duration", written / duration)
    batch = tool.point("batch", tool.number("max_concurrency"))
    shared = {
        "batch": batch,
        "prompt_len": tool.point("prompt_len", tool.need("total_input_tokens") / completed),
        "output_len": tool.point("output_len", written / completed),
        "conditions": _serving_conditions(tool, name, speculation),
    }
    yield {**shared, "metric": "output_tok_s", "p50": rate, "n": 1}
    for metric, detail in (("ttft_ms", "ttfts"), ("tpot_ms", "itls")):
        if spread := _latency(tool, metric, detail):
            yield {**shared, "metric": metric, "n": round(completed), **spread}
            if metric == "tpot_ms" and batch == 1:  # one stream decodes 1 / TPOT tokens a second
                yield {
                    **shared,
                    "metric": "decode_tok_s",
                    "n": round(completed),
                    **_inverse(spread),
                }


def _serving_conditions(tool: _Reading, name: str, speculation: float | None) -> Record:
    conditions = {
        "timing": f"{name}, client side",
        "request_rate": tool.record.get("request_rate", "not stated"),
        "failed": round(tool.number("failed", 0)),
        "lengths": "means over the requests",
    }
    if speculation:
        conditions["speculation"] = f"acceptance length {speculation:.2f}"
    return conditions


def _latency(tool: _Reading, metric: str, detail: str) -> Record | None:
    """Median and spread in ms of a metric; None where the tool found no request to take it from.

    A detailed file lists every request's times in seconds: the spread is then computed, and the
    median that the tool wrote is checked against it.
    """
    median = tool.number(f"median_{metric}")
    if not median:
        return None
    named = {
        "p20": tool.number(f"p20_{metric}"),
        "p50": median,
        "p80": tool.number(f"p80_{metric}"),
    }
    times = [1e3 * _seconds(value) for value in tool.record.get(detail) or [] if value]
    if not times:
        return named
    found = {name: float(np.quantile(times, q)) for name, q in QUANTILES.items()}
    if metric == "ttft_ms":
        tool.agree(f"median_{metric}", median, f"the median of {detail}", found["p50"])
    return {**found, "p50": median} if found["p20"] <= median <= found["p80"] else named


def _seconds(value: float | list[float]) -> float:
    """A request's time, or the mean of its gaps: its TPOT where every chunk is one token."""
    return float(np.mean(value)) if isinstance(value, list) else float(value)


def _inverse(spread: Record) -> Record:
    """tok/s of one stream from ms a token; the order of the percentiles turns round."""
    turned = {"p20": "p80", "p50": "p50", "p80": "p20"}
    return {name: 1e3 / spread[of] if spread[of] else None for name, of in turned.items()}


def _vllm_serve(tool: _Reading) -> Iterator[Record]:
    yield from _serving(tool, "vllm bench serve", tool.number("spec_decode_acceptance_length"))


def _sglang_serving(tool: _Reading) -> Iterator[Record]:
    length = tool.number("accept_length")
    yield from _serving(tool, "sglang bench_serving", length if length and length > 1 else None)


def _vllm_latency(tool: _Reading) -> Iterator[Record]:
    """Seconds of a whole batch from request to last token; the file holds neither its size nor
    lengths."""
    times = np.array(tool.record["latencies"], dtype=float)
    tool.agree(
        "avg_latency", tool.need("avg_latency"), "the mean of latencies", float(times.mean())
    )
    point = {name: tool.point(name, None) for name in ("batch", "prompt_len", "output_len")}
    rates = point["batch"] * point["output_len"] / times
    spread = {name: float(np.quantile(rates, q)) for name, q in QUANTILES.items()}
    conditions = {"timing": "vllm bench latency, whole batch, prefill included"}
    yield {**point, "metric": "output_tok_s", "n": len(times), **spread, "conditions": conditions}


def _trtllm(tool: _Reading) -> Iterator[Record]:
    """Averages of a run; the percentiles that it also writes are checked for their unit."""
    requests = round(tool.need("request_info.num_requests"))
    rate = tool.need("performance.system_output_throughput_tok_s")
    written = requests * tool.need("request_info.avg_output_length")
    seconds = tool.need("performance.total_latency_ms") / 1e3
    tool.agree(
        "system_output_throughput_tok_s",
        rate,
        "output tokens / total_latency_ms",
        written / seconds,
    )
    shared = {
        "batch": tool.point("batch", tool.number("request_info.avg_num_concurrent_requests")),
        "prompt_len": tool.point("prompt_len", tool.need("request_info.avg_input_length")),
        "output_len": tool.point("output_len", tool.need("request_info.avg_output_length")),
        "conditions": _trtllm_conditions(tool),
    }
    yield {**shared, "metric": "output_tok_s", "p50": rate, "n": 1}
    for metric, name in (("ttft_ms", "ttft"), ("tpot_ms", "tpot")):
        if mean := tool.number(f"streaming_metrics.avg_{name}_ms"):
            average = tool.number(f"streaming_metrics.{name}_percentiles.average", mean)
            tool.agree(f"{name}_percentiles.average", average, f"avg_{name}_ms", mean)
            median = tool.number(f"streaming_metrics.{name}_percentiles.p50", mean)
            yield {**shared, "metric": metric, "p50": median, "n": requests}


def _trtllm_conditions(tool: _Reading) -> Record:
    conditions = {
        "timing": "trtllm-bench, inside the process",
        "lengths": "means over the requests",
    }
    version = tool.record.get("engine", {}).get("version")
    stated = {"version": version} if version else {}
    mode = (tool.record.get("decoding_stats") or {}).get("mode")
    return conditions | stated | ({"speculation": mode} if mode else {})


READERS: dict[str, Callable[[_Reading], Iterator[Record]]] = {
    "vllm bench serve": _vllm_serve,
    "vllm bench latency": _vllm_latency,
    "sglang bench_serving": _sglang_serving,
    "trtllm-bench": _trtllm,
}

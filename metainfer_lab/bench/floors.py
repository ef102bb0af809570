"""The floor of each metric at an operating point, and what it is worth on a machine."""

from __future__ import annotations

from metainfer_lab.bench.workload import Workload
from metainfer_lab.plan import Plan


def floors(
    planned: Plan, workload: Workload, experts_touched: float | None = None
) -> dict[str, float]:
    """Floor of each metric: the most a rate can be, the least a time can be; tok/s and ms.

    A decode step holds the workload's mean context and touches the experts that it was seen to
    touch (distinct ones a layer; None: as many as uniform routing would). On a GPU at nominal
    rates, which nothing passes; on a CPU, which has no data sheet that helps, at measured rates.
    """
    kind = "nominal" if planned.hardware.is_gpu else "planning"
    context = round(workload.mean_context)
    rate = planned.floor_tok_s(workload.concurrency, context, experts_touched, kind)
    first = planned.floor_ttft_ms(workload.prompt_len, kind)
    step = 1e3 * workload.concurrency / rate
    whole = first + (workload.output_len - 1) * step
    return {
        "ttft_ms": first,
        "tpot_ms": step,
        "decode_tok_s": rate,
        "output_tok_s": 1e3 * workload.concurrency * workload.output_len / whole,
    }


def floor_kind(planned: Plan) -> str:
    """What a floor on this machine is worth: see `results.FLOORS`."""
    hardware = planned.hardware
    if hardware.is_gpu:
        return "nominal"
    fits = planned.weight_bytes_per_token <= hardware.cache_bytes
    return "cache-resident" if fits else "measured"

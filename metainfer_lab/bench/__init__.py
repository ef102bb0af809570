"""Workloads, timing, baselines, and the one schema in which every result is written.

workload.py      what is asked while the clock runs
timing.py        clocks outside the engine's process; A B B A
rivals.py        who can run beside an engine; rival.py what they share
transformers.py  the baseline at its best setting on this machine; vllm.py, llamacpp.py where there
products.py      one token's matrix products alone
compare.py       `bench`: an engine and its rivals in turn, as rows
floors.py        the least time and the most tokens a second at a point
results.py       the result schema; ledger.py the schema of what was tried
worker.py        a baseline's process

The names below are loaded on first use: a baseline's process imports its own module only.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Workload": "workload",
    "bench": "compare",
    "matrix_product_rate": "products",
    "measure": "compare",
    "reopened": "compare",
    "sweep": "compare",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"metainfer_lab.bench has no {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)

"""What the compiler made of a kernel, for any target, without a GPU.

kernel.py     what an engine says of a kernel: source, build, launch, use
targets.py    GPUs: issue rate, what limits occupancy
compilers.py  NVRTC and Triton, to machine code
sass.py       machine code as instructions
flow.py       blocks, loops, the steady path round a loop
report.py     counts and costs of one kernel; budgets
engines.py    all kernels of an engine, in a process of their own
difference.py two reports side by side
view.py       text and HTML

The names below are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Budget": "report",
    "Difference": "difference",
    "Kernel": "kernel",
    "Report": "report",
    "build": "report",
    "compare": "difference",
    "inspect": "engines",
    "inspect_kernel": "engines",
    "summary": "difference",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"metainfer_lab.inspection has no {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value

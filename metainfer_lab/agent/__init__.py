"""The agent: the loop over the Messages API, its tools, budgets, transcripts and providers.

loop.py        one step follows from the transcript's last line
phases.py      the chain of phases that follows from a spec
prompts.py     what the author reads
tools.py       what the author can call; editor.py the one way that files change
providers.py   where replies come from: a record, a folder (desk.py), the API
transcript.py  lines, chained by hash
review.py      the reviewer: a fresh context of code and skills
inspector.py   what the compiler made of a kernel, from within the sandbox
run.py         a run as a folder; turns.py its turns, tables.py runs in rows; publish.py the record
replay.py      a recorded run carried out again, divergences listed
toolbox.py     workspace and adopt, for an agent of one's own

The names below are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Phase": "phases",
    "Run": "run",
    "adopt": "toolbox",
    "by_spec": "tables",
    "changed": "phases",
    "explain": "phases",
    "generate": "generation",
    "overview": "tables",
    "record": "publish",
    "runs": "run",
    "table": "tables",
    "workspace": "toolbox",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"metainfer_lab.agent has no {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)

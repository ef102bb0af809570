"""The keep-or-discard loop: one change, gates, paired measurement, keep or discard, one row.

sequential.py  when noise may decide: a sign test valid at every look
records.py     settings, proposals, blocks of runs, profiles
search.py      where to go next, from the ledger alone
bench.py       the machine's side; profiling.py where a step's time goes
size.py        how long an engine is
trial.py       one proposal from its tree to its row, through events on the disk
loop.py        the loop; tools.py and prompts.py what its author calls and reads; desk.py its folder
run.py         `optimise`: a run as a folder; replay.py a record followed again

The names below are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Optimisation": "run",
    "Proposal": "records",
    "optimise": "run",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"metainfer_lab.optimise has no {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)

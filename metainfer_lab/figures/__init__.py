"""The only place that draws: a table in, a `Figure` out. No file is read, no pyplot state kept.

style.py        one style sheet, a fixed look for each engine, captions
performance.py  rates beside each other and beside the floor
process.py      a generation's turns, an optimisation's tries
bounds.py       floors; issue time against memory time
matrix.py       which gate kills which wrong engine
published.py    figures of the record: drawn anew, or held to what was published
"""

from __future__ import annotations

from metainfer_lab.figures.bounds import floors_by_batch, issue_against_memory
from metainfer_lab.figures.matrix import kill_matrix
from metainfer_lab.figures.performance import single_stream, step_shares, throughput
from metainfer_lab.figures.process import running_best, timeline
from metainfer_lab.figures.published import PUBLISHED, check, publish, save

__all__ = [
    "PUBLISHED",
    "check",
    "floors_by_batch",
    "issue_against_memory",
    "kill_matrix",
    "publish",
    "running_best",
    "save",
    "single_stream",
    "step_shares",
    "throughput",
    "timeline",
]

"""Reports side by side: two versions of a kernel, or all kernels of an engine as a table."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from metainfer_lab.inspection import view
from metainfer_lab.inspection.kernel import Record
from metainfer_lab.inspection.report import Report

if TYPE_CHECKING:
    import pandas as pd


class Difference(view.Shown, Record):
    """What changed from one report to another: numbers, opcodes of the inner loop, source."""

    names: tuple[str, str]
    numbers: list[tuple[str, float | None, float | None]]
    opcodes: dict[str, tuple[int, int]]
    source: str

    def __str__(self) -> str:
        return view.text_table(("", *self.names), self.numbers) + "\n\n" + self._opcode_text()

    def _opcode_text(self) -> str:
        rows = [(name, *counts) for name, counts in self.opcodes.items()]
        return view.text_table(("opcode, a turn", "before", "after"), rows)

    def _repr_html_(self) -> str:
        rows = [(name, *counts) for name, counts in self.opcodes.items()]
        opcodes = view.table_html(("opcode, a turn", *self.names), rows)
        parts = view.fold(f"{len(rows)} opcodes whose count differs", opcodes)
        if self.source:
            parts += view.fold("difference of the sources", view.code(self.source, "diff"))
        return view.table_html(("", *self.names), self.numbers) + parts


def compare(before: Report, after: Report) -> Difference:
    """Two versions of a kernel, or one kernel on two targets (whose sources are then one)."""
    same_target = before.arch == after.arch
    labels = [
        r.kernel.name if same_target else f"{r.kernel.name}, {r.arch}" for r in (before, after)
    ]
    sources = [report.stages["source"].splitlines() for report in (before, after)]
    diff = difflib.unified_diff(*sources, *labels, lineterm="")
    left, right = _numbers(before), _numbers(after)
    return Difference(
        names=tuple(labels),
        numbers=[(name, left[name], right[name]) for name in left],
        opcodes=_changed(before.inner.opcodes, after.inner.opcodes),
        source="\n".join(diff),
    )


def _changed(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    counts = {n: (before.get(n, 0), after.get(n, 0)) for n in sorted(before.keys() | after.keys())}
    return {name: pair for name, pair in counts.items() if pair[0] != pair[1]}


def _numbers(report: Report) -> dict[str, float | None]:
    return {
        "registers": report.registers,
        "local accesses": report.local_accesses,
        "shared bytes": report.shared_bytes,
        "blocks on a multiprocessor": report.occupancy.blocks,
        "widest load, bytes": report.widest_load,
        "instructions a turn": report.inner.issued,
        "weights a lane and turn": report.inner.weights,
        "lane-instructions per weight": report.per_weight,
        "issue time, us": report.issue_us,
        "memory time, us": report.memory_us,
    }


def summary(reports: Iterable[Report]) -> pd.DataFrame:
    """One row a report: what a launch and what a step's launches of it cost, in microseconds."""
    import pandas as pd

    return pd.DataFrame([_row(report) for report in reports])


def _row(report: Report) -> dict[str, object]:
    kernel, step = report.kernel, report.kernel.launches
    issue = report.issue_us
    return {
        "kernel": kernel.name,
        "arch": report.arch,
        "registers": report.registers,
        "local": report.local_accesses,
        "shared_bytes": report.shared_bytes,
        "blocks_per_sm": report.occupancy.blocks,
        "per_weight": report.per_weight,
        "launches": step,
        "mb": kernel.bytes / 1e6,
        "issue_us": None if issue is None else issue * step,
        "memory_us": report.memory_us * step,
    }

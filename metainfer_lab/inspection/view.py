"""Reports as text and as HTML: one table, the compiler's stages folded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from metainfer_lab.markup import code, fold, table

if TYPE_CHECKING:
    from metainfer_lab.inspection.report import Checks, Report

Table = tuple[Sequence[str], list[Sequence[object]]]
PYGMENTS = {"cuda": "cuda", "triton": "python"}
LINES = 300  # of a text that are shown; the whole of it is in the report's `stages`
MARKS = {True: "✓", False: "✗"}


class Shown:
    """Words for a terminal and a notebook's plain text, instead of pydantic's fields."""

    def _repr_pretty_(self, printer: object, cycle: bool) -> None:
        printer.text(str(self))  # type: ignore[attr-defined]


def report_table(report: Report) -> Table:
    """The numbers of a report in words."""
    inner, kernel = report.inner, report.kernel
    path = f"{inner.issued} instructions a turn"
    if inner.body != inner.issued:
        path += f" (of {inner.body} in its body)"
    rows = [
        ("registers a thread", report.registers),
        ("local memory", f"{report.local_accesses} accesses, {report.stack_bytes} B of stack"),
        ("shared memory", f"{report.shared_bytes:,} B a block of {kernel.block} threads"),
        ("on one multiprocessor", str(report.occupancy)),
        (inner.kind, f"{path}, {report.outside} outside, {report.instructions} in all"),
        ("matrix products", _counts(inner.matrix)),
        ("memory accesses", _counts(inner.accesses)),
    ]
    return ("", report.arch), [*rows, *_cost_rows(report)]


def _cost_rows(report: Report) -> list[Sequence[object]]:
    kernel, rows = report.kernel, []
    if report.per_weight:
        text = f"{report.inner.weights:.0f} weights a lane and turn"
        rows.append(("per weight", f"{report.per_weight:.2f} lane-instructions ({text})"))
    if kernel.bytes:
        rate = f"{kernel.bytes / 1e6:.2f} MB at {report.target.bandwidth / 1e12:g} TB/s"
        rows.append(("memory time", f"{report.memory_us:.2f} us: {rate}"))
    if report.issue_us:
        share = f"{report.issue_share:.0%} of memory time" if report.issue_share else ""
        rows.append(("issue time", f"{report.issue_us:.2f} us: {share}"))
    if kernel.operations:
        work = f"{kernel.operations / 1e6:,.1f} M operations"
        rows.append(("arithmetic time", f"{report.arithmetic_us:.3f} us: {work}"))
    return rows


def checks_table(checks: Checks) -> Table:
    """One row a line of the budget."""
    rows = [
        (MARKS[check.passed], check.asked, check.allowed, check.found) for check in checks.checks
    ]
    return ("", "asked", "allowed", "found"), rows


def _counts(counted: dict[str, int]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counted.items()) or "none"


def report_html(report: Report, unfolded: Sequence[str] = ()) -> str:
    """A table, then source, intermediate forms, PTX and SASS, and the opcodes of the inner loop."""
    heading = f"<b>{escape(f'{report.kernel.name} for {report.arch}')}</b>"
    opcodes = table_html(("opcode", "in a turn"), list(report.inner.opcodes.items()))
    folds = [fold("opcodes of the inner loop", opcodes, "opcodes" in unfolded)]
    for stage, text in report.stages.items():
        language = {"naive": "python", "source": PYGMENTS[report.kernel.language]}.get(stage)
        title, part = excerpt(text, report.kernel.entry)
        folds.append(fold(f"{stage}, {title}", code(part, language), stage in unfolded))
    return heading + table_html(*report_table(report)) + "".join(folds)


def excerpt(text: str, name: str) -> tuple[str, str]:
    """How long a text is, and of a long one the part about the first line that has a name."""
    lines = text.splitlines()
    if len(lines) <= LINES:
        return f"{len(lines):,} lines", text
    named = next((place for place, line in enumerate(lines) if name in line), 0)
    first = max(0, min(named - LINES // 2, len(lines) - LINES))
    title = f"{len(lines):,} lines, of them {first + 1} to {first + LINES}"
    return title, "\n".join(lines[first : first + LINES])


def table_html(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A plain table, its numbers as short as in text."""
    return table(head, [[cell_text(cell) for cell in row] for row in rows])


def text_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns of text, two spaces between them."""
    lines = [list(head), *([cell_text(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def cell_text(value: object) -> str:
    """A cell: numbers short."""
    if value is None:
        return "-"
    if isinstance(value, float | int) and not isinstance(value, bool):
        return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"
    return str(value)

"""A run while it goes on: plain lines, or in a notebook one view that is brought up to date."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from metainfer_lab.agent.budget import total_cost
from metainfer_lab.agent.transcript import Line
from metainfer_lab.live import in_notebook

KEPT = 14  # events of a cell's view
STATUS = "turn "  # what the line of `status` begins with


def say_plainly(text: str) -> None:
    """One plain line an event: a log, a notebook that runs headless; in a terminal the lines that
    say where the run stands are bold."""
    bold = text.startswith(STATUS) and sys.stdout.isatty()
    print(f"\x1b[1m{text}\x1b[0m" if bold else text, flush=True)


def status(lines: Sequence[Line]) -> str:
    """Where a run stands: turn, role, phase, attempt, tokens, cost, the last verdict."""
    replies = [line for line in lines if line.author == "assistant"]
    last = replies[-1]
    parts = [f"{STATUS}{len(replies)}", last.role, f"phase {last.phase}", f"attempt {last.attempt}"]
    usages = [line.usage for line in lines if line.usage]
    if usages:
        parts.append(f"{sum(sum(usage.values()) for usage in usages):,} tokens")
    if (cost := total_cost(lines)) is not None:
        parts.append(f"{cost:.2f} USD")
    if judged := [judgement for line in lines for judgement in line.judgements]:
        failed = ", ".join(judged[-1].failed) or "a gate"
        parts.append(f"last verdict {'passed' if judged[-1].passed else f'failed: {failed}'}")
    return " · ".join(parts)


class CellView:
    """The newest status and the last events, in one output of a cell."""

    def __init__(self) -> None:
        from IPython.display import display

        self.status, self.events = "", deque[str](maxlen=KEPT)
        self.handle: Any = display({"text/plain": ""}, raw=True, display_id=True)

    def __call__(self, text: str) -> None:
        """Take an event in."""
        if text.startswith(STATUS):
            self.status = text
        else:
            self.events.extend(text.splitlines())
        lines = "\n".join(self.events)
        html = f"<b>{escape(self.status)}</b><pre>{escape(lines)}</pre>"
        self.handle.update({"text/plain": f"{self.status}\n{lines}", "text/html": html}, raw=True)


def view() -> Callable[[str], None]:
    """The view that suits the place: a cell's, where a notebook is open, plain lines elsewhere."""
    return CellView() if in_notebook() else say_plainly

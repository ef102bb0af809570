"""Progress for people: one line that changes in a notebook, plain lines in a log or a terminal."""

from __future__ import annotations

import os
import sys
import time

BATCH = "METAINFER_LAB_BATCH"


def in_kernel() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")


def in_notebook() -> bool:
    """Whether output goes to a notebook that somebody looks at: a kernel, not in batch."""
    return in_kernel() and os.environ.get(BATCH) != "1"


class Silent:
    """Progress that nobody watches."""

    def update(self, text: str) -> None:
        """Nothing."""

    close = update


class Live:
    """A line of progress: `update` changes it in a notebook and prints a new one elsewhere.

    Elsewhere at most one line every `every_s` seconds, so that a log stays readable; the first
    line and the one given to `close` always appear.
    """

    def __init__(self, every_s: float = 2.0) -> None:
        self.every_s, self.last = every_s, float("-inf")
        self.display: object | None = None

    def update(self, text: str) -> None:
        """Show where things are."""
        if in_notebook():
            self._show(text)
        elif time.monotonic() - self.last >= self.every_s:
            self._print(text)

    def close(self, text: str) -> None:
        """Show how it ended."""
        if in_notebook():
            self._show(text)
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        self.last = time.monotonic()
        # a command's stdout may be JSON; a kernel's stderr would look like trouble
        print(text, file=sys.stdout if in_kernel() else sys.stderr, flush=True)

    def _show(self, text: str) -> None:
        from IPython.display import display

        data = {"text/plain": text}
        if self.display is None:
            self.display = display(data, raw=True, display_id=True)
        else:
            self.display.update(data, raw=True)

"""One reply of an author and what came of it, measured: a row of the timeline, a diff, lines."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from metainfer_lab.agent.loop import executed
from metainfer_lab.agent.transcript import Line
from metainfer_lab.paths import tree_files

ROW = [
    "turn",
    "time",
    "seconds",
    "role",
    "phase",
    "attempt",
    "calls",
    "gates",
    "passed",
    "submission",
]
ROW += ["findings", "lines_added", "lines_removed", "input_tokens", "output_tokens", "tree"]


def row(number: int, asked: Line, reply: Line, results: Line | None) -> list[Any]:
    judged = results.judgements if results else []
    added, removed = _changed(reply)
    usage = reply.usage or {}
    return [
        number,
        reply.time,
        reply.seconds + (results.seconds if results else 0.0),
        reply.role,
        reply.phase,
        reply.attempt,
        _counted(call["name"] for call in reply.calls),
        ", ".join(dict.fromkeys(gate for j in judged for gate in j.gates)),
        all(j.passed for j in judged) if judged else None,
        any(j.submission for j in judged),
        len(results.findings) if results and results.findings is not None else None,
        added,
        removed,
        usage.get("input_tokens"),
        usage.get("output_tokens"),
        (results or reply).tree,
    ]


def _counted(names: Iterable[str]) -> str:
    counts = Counter(names)
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())


def _changed(reply: Line) -> tuple[int, int]:
    """Lines that a reply's edits write, and lines that they name as replaced."""
    calls = executed(reply) if reply.role == "implementer" else []
    inputs = [call["input"] for call in calls if isinstance(call["input"], dict)]
    written = ("file_text", "new_str", "insert_text")
    added = sum(len(str(i[key]).splitlines()) for i in inputs for key in written if key in i)
    return added, sum(len(str(i.get("old_str", "")).splitlines()) for i in inputs)


def diff(before: Path, after: Path) -> str:
    """Unified diff of two trees."""
    names = {p.relative_to(root).as_posix() for root in (before, after) for p in tree_files(root)}
    parts = []
    for name in sorted(names):
        old, new = (_lines(root / name) for root in (before, after))
        parts += difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", n=2)
    return "".join(part if part.endswith("\n") else part + "\n" for part in parts)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True) if path.is_file() else []


def lines_of_code(folder: Path) -> int:
    """Lines of an engine's Python files that are not blank."""
    texts = [path.read_text() for path in tree_files(folder) if path.suffix == ".py"]
    return sum(bool(line.strip()) for text in texts for line in text.splitlines())

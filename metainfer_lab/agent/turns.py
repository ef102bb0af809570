"""One reply of an author and what came of it, measured: a row of the timeline, a diff, lines."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from metainfer_lab.agent.loop import executed
from metainfer_lab.agent.tools import texts
from metainfer_lab.agent.transcript import Line


def row(number: int, reply: Line, results: Line | None) -> dict[str, Any]:
    """A turn as a row of the timeline; what nobody said, or no gate judged, is None."""
    judged, usage = results.judgements if results else [], reply.usage or {}
    findings = results.findings if results else None
    added, removed = _changed(reply)
    return {
        "turn": number,
        "time": reply.time,
        "seconds": reply.seconds + (results.seconds if results else 0.0),
        "role": reply.role,
        "phase": reply.phase,
        "attempt": reply.attempt,
        "calls": counted(call["name"] for call in reply.calls),
        "gates": ", ".join(dict.fromkeys(gate for j in judged for gate in j.gates)),
        "passed": all(j.passed for j in judged) if judged else None,
        "submission": any(j.submission for j in judged),
        "findings": None if findings is None else len(findings),
        "lines_added": added,
        "lines_removed": removed,
        "input_tokens": usage.get("input_tokens"),
        "output_tokens": usage.get("output_tokens"),
        "tree": (results or reply).tree,
    }


def counted(names: Iterable[str]) -> str:
    """Names in order of appearance, each with how often where more than once."""
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
    old, new = texts(before), texts(after)
    parts = []
    for name in sorted(old.keys() | new.keys()):
        sides = (side.get(name, "").splitlines(keepends=True) for side in (old, new))
        parts += difflib.unified_diff(*sides, f"a/{name}", f"b/{name}", n=2)
    return "".join(part if part.endswith("\n") else part + "\n" for part in parts)


def lines_of_code(folder: Path) -> int:
    """Lines of an engine's Python files that are not blank."""
    sources = [text for name, text in texts(folder).items() if name.endswith(".py")]
    return sum(bool(line.strip()) for text in sources for line in text.splitlines())

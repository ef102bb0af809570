"""What must not enter a record: keys, and the paths of the machine that made it."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

from metainfer_lab.paths import ROOT, cache_dir

KEY = re.compile(r"sk-ant-[A-Za-z0-9_-]{8,}")


def scrub(text: str, names: dict[Path, str] | None = None) -> str:
    """Text with keys replaced by <key> and machine paths by what they are; `names` adds paths."""
    key = os.environ.get("ANTHROPIC_API_KEY")
    if key:
        text = text.replace(key, "<key>")
    text = KEY.sub("<key>", text)
    known = (names or {}) | {ROOT: "<repository>", cache_dir(): "<cache>", Path.home(): "~"}
    known[Path(tempfile.gettempdir())] = "<tmp>"
    for path in sorted(known, key=lambda p: -len(str(p))):
        text = re.sub(re.escape(str(path)) + r"(?=[/\s\"'\\:,;)\]}]|$)", known[path], text)
    return text


def scrub_all(value: Any, names: dict[Path, str] | None = None) -> Any:
    """`scrub` on every string of a JSON value."""
    if isinstance(value, str):
        return scrub(value, names)
    if isinstance(value, list):
        return [scrub_all(item, names) for item in value]
    if isinstance(value, dict):
        return {key: scrub_all(item, names) for key, item in value.items()}
    return value

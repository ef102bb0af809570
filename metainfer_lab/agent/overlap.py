"""The blank-sheet check: long runs of lines that an engine shares with what its author could copy.

Lines are compared without indentation, blank lines, comments and imports. Short overlaps are what
two people write who follow one formula; `WINDOW` lines in a row are not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel

from metainfer_lab.paths import tree_files
from metainfer_lab.skills import load_skills

WINDOW = 8
MODELS = ("transformers", "vllm", "sglang", "tensorrt_llm", "flash_attn", "fla", "flashinfer")
PACKAGES = (*MODELS, "safetensors", "torch", "triton")
SKIPPED = ("#", "import ", "from ", '"""')
LEAST_CHARACTERS = 160  # of a window, so that eight closing brackets are no overlap

Window = tuple[str, ...]


class Overlap(BaseModel):
    """One shared window: where it stands in the engine, and where it stands too."""

    file: str
    line: int
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} repeats {WINDOW} lines of {self.source}"


def overlaps(engine: Path) -> list[Overlap]:
    """Windows of an engine's files that installed packages or the skills hold too."""
    ours: dict[Window, tuple[str, int]] = {}
    for path in tree_files(engine):
        if path.suffix in {".py", ".cu", ".cuh"}:
            name = path.relative_to(engine).as_posix()
            for line, window in windows(path.read_text(errors="replace")):
                ours.setdefault(window, (name, line))
    if not ours:
        return []
    found: dict[str, Overlap] = {}
    beginnings = {window[0] for window in ours}
    for source, text in _corpus():
        for _, window in windows(text, beginnings):
            if window in ours:
                file, line = ours[window]
                found.setdefault(f"{file}:{source}", Overlap(file=file, line=line, source=source))
    return list(found.values())


def windows(text: str, beginnings: set[str] | None = None) -> Iterator[tuple[int, Window]]:
    """(first line's number, `WINDOW` consecutive lines that count) of a text.

    beginnings: first lines of interest; all when None.
    """
    kept = [
        (number, " ".join(line.split()))
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.strip().startswith(SKIPPED)
    ]
    for i in range(len(kept) - WINDOW + 1):
        if beginnings is not None and kept[i][1] not in beginnings:
            continue
        window = tuple(line for _, line in kept[i : i + WINDOW])
        if sum(map(len, window)) >= LEAST_CHARACTERS:
            yield kept[i][0], window


def _corpus() -> Iterator[tuple[str, str]]:
    for skill in load_skills().values():
        yield f"skill {skill.name}", skill.body
    for path in _package_files(PACKAGES):
        yield "/".join(path.parts[-3:]), path.read_text(errors="replace")


def _package_files(names: Iterable[str]) -> Iterator[Path]:
    for name in names:
        spec = importlib.util.find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or []:
            yield from sorted(Path(folder).rglob("*.py"))

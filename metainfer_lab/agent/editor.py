"""The text editor tool (text_editor_20250728) on one folder, and on nothing outside it.

Every change to an engine goes through here, so the tree after any turn follows from the transcript
alone.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from metainfer_lab.paths import tree_files

MAX_FILE_BYTES = 200_000
MAX_TREE_BYTES = 2_000_000


class ToolError(Exception):
    """A tool call that cannot be done; its text goes back to the author as an error result."""


class _Command(BaseModel):
    model_config = ConfigDict(extra="forbid")

    path: str


class View(_Command):
    """Show a file with line numbers, or list a folder; view_range is [first, last], -1 the end."""

    command: Literal["view"]
    view_range: tuple[int, int] | None = None


class Create(_Command):
    """Write a file whole, replacing what was there."""

    command: Literal["create"]
    file_text: str


class Replace(_Command):
    """Replace text that occurs exactly once."""

    command: Literal["str_replace"]
    old_str: str = Field(min_length=1)
    new_str: str = ""


class Insert(_Command):
    """Insert text after a line; 0 is the beginning."""

    command: Literal["insert"]
    insert_line: int = Field(ge=0)
    insert_text: str


class Remove(_Command):
    """Delete a file (a tool of its own: the editor has no such command)."""

    command: Literal["remove"]


Edit = Annotated[View | Create | Replace | Insert | Remove, Field(discriminator="command")]


def confine(root: Path, path: str) -> Path:
    """The file below `root` that a relative path means; ToolError for any way out of it."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\\" in path or "\0" in path:
        raise ToolError(f"{path!r}: give a path relative to the engine folder, without '..'")
    if any(part.startswith(".") or part == "__pycache__" for part in pure.parts):
        raise ToolError(f"{path!r}: hidden files and caches are not part of an engine")
    target = root.joinpath(*pure.parts)
    steps = [target, *target.parents]
    if any(step.is_symlink() for step in steps[: steps.index(root)]):
        raise ToolError(f"{path!r}: is a link; an engine holds plain files")
    return target


def edit(root: Path, command: View | Create | Replace | Insert | Remove) -> str:
    """Do one command below `root` and say what was done."""
    target = confine(root, command.path)
    match command:
        case View():
            return listed(root, target) if target.is_dir() else _show(target, command)
        case Create():
            return _write(root, target, command.file_text)
        case Replace():
            return _replace(root, target, command)
        case Insert():
            return _insert(root, target, command)
        case Remove():
            _text(target, command.path)
            target.unlink()
            return f"removed {command.path}"


def _text(target: Path, path: str) -> str:
    if not target.is_file():
        raise ToolError(f"{path!r}: no such file")
    return target.read_text()


def listed(root: Path, target: Path, empty: str = "(empty)") -> str:
    """Files below a folder of an engine's, each with its lines, one a line."""
    rows = [
        f"- {p.relative_to(root).as_posix()} ({len(p.read_text().splitlines())} lines)"
        for p in tree_files(target)
    ]
    return "\n".join(rows) or empty


def _show(target: Path, command: View) -> str:
    lines = _text(target, command.path).splitlines()
    first, last = command.view_range or (1, -1)
    last = len(lines) if last == -1 else last
    if not 1 <= first <= last <= max(len(lines), 1):
        raise ToolError(f"view_range {[first, last]}: the file has {len(lines)} lines")
    return "\n".join(f"{n:6d}\t{lines[n - 1]}" for n in range(first, min(last, len(lines)) + 1))


def _write(root: Path, target: Path, text: str) -> str:
    blob = text.encode()
    others = sum(p.stat().st_size for p in root.rglob("*") if p.is_file() and p != target)
    if len(blob) > MAX_FILE_BYTES or others + len(blob) > MAX_TREE_BYTES:
        raise ToolError(f"too large: {MAX_FILE_BYTES} bytes a file, {MAX_TREE_BYTES} an engine")
    if target.is_dir() or any(parent.is_file() for parent in target.parents):
        raise ToolError(f"{target.relative_to(root)}: a file and a folder cannot share a name")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(blob)
    return f"wrote {target.relative_to(root).as_posix()} ({len(text.splitlines())} lines)"


def _replace(root: Path, target: Path, command: Replace) -> str:
    text = _text(target, command.path)
    count = text.count(command.old_str)
    if count != 1:
        raise ToolError(
            f"old_str occurs {count} times in {command.path}; it must occur exactly once"
        )
    return _write(root, target, text.replace(command.old_str, command.new_str))


def _insert(root: Path, target: Path, command: Insert) -> str:
    lines = _text(target, command.path).splitlines(keepends=True)
    if command.insert_line > len(lines):
        raise ToolError(f"insert_line {command.insert_line}: the file has {len(lines)} lines")
    lines.insert(command.insert_line, command.insert_text.rstrip("\n") + "\n")
    return _write(root, target, "".join(lines))

"""The transcript: one JSON line per message, each naming the hash of the line before.

The file alone says where a run stands: what was asked, what was answered, which tree of files
followed, what the gates said. Nothing else is needed to resume or to replay.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from metainfer_lab.errors import InputError
from metainfer_lab.skills import Role

FILE = "transcript.jsonl"
FIRST = "0" * 64
Block = dict[str, Any]


class Judgement(BaseModel):
    """One call of the gates: the tool call's id, the verdict's file, or why there is none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    call: str = ""
    gates: list[str]
    failed: list[str] = []
    passed: bool
    submission: bool
    file: str | None = None
    error: str | None = None


class Finding(BaseModel):
    """What a reviewer holds against a file: where, by which skill, what was expected, what stands
    there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str
    line: int = Field(ge=1)
    skill: str
    expected: str = Field(min_length=1)
    actual: str = Field(min_length=1)

    def __str__(self) -> str:
        where = f"{self.file}:{self.line} ({self.skill})"
        return f"{where}: expected {self.expected}; actual {self.actual}"


class Line(BaseModel):
    """One message with its circumstances.

    conversation: counts fresh contexts; tree: hash of the engine's files when the message was
    complete (for tool results: after the tools ran); seconds: how long the author or the tools
    took; usage: null where no API said it; findings: of a review that was handed in, empty where
    the reviewer has none; restores: number of an earlier line to whose tree the folder was put
    back before this one; previous: SHA-256 of the line before.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    n: int
    time: str
    seconds: float
    conversation: int
    phase: str
    attempt: int
    role: Role = "implementer"
    message: dict[str, Any]
    stop_reason: str | None = None
    model: str | None = None
    usage: dict[str, int] | None = None
    judgements: list[Judgement] = []
    findings: list[Finding] | None = None
    restores: int | None = None
    tree: str
    previous: str

    @property
    def author(self) -> str:
        """`user` (the loop) or `assistant` (whoever has the role)."""
        return self.message["role"]

    @property
    def blocks(self) -> list[Block]:
        """The message's content as blocks."""
        content = self.message["content"]
        return [{"type": "text", "text": content}] if isinstance(content, str) else content

    @property
    def calls(self) -> list[Block]:
        """The tool calls of a reply, in order."""
        return [block for block in self.blocks if block["type"] == "tool_use"]

    @property
    def submission(self) -> Judgement | None:
        """The judgement of a submitted phase, if this line answers a submission."""
        return next((j for j in self.judgements if j.submission), None)


class Transcript:
    """Lines of a run; only `append` adds one, and it is on the disk when that returns."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self.path = path
        self.lines = list(_read(path, mend=writable))

    @property
    def last(self) -> Line | None:
        return self.lines[-1] if self.lines else None

    def append(self, **fields: Any) -> Line:
        """Add a line: numbered, dated, chained to the one before."""
        line = Line(
            n=len(self.lines),
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            previous=digest(self.last),
            **fields,
        )
        with self.path.open("ab") as file:
            file.write((_dump(line) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(line)
        return line

    def messages(self, conversation: int) -> list[dict[str, Any]]:
        """The messages of one conversation, as the Messages API takes them."""
        return [line.message for line in self.lines if line.conversation == conversation]

    def replies(self, role: Role | None = None) -> list[Line]:
        """Every line that an author wrote, or that one of them did."""
        replies = [line for line in self.lines if line.author == "assistant"]
        return [line for line in replies if role in (None, line.role)]

    def rejections(self, phase: str) -> list[list[Finding]]:
        """Findings of every review that turned a phase down."""
        return [line.findings for line in self.lines if line.phase == phase and line.findings]

    def broken_link(self) -> int | None:
        """Number of the first line that does not follow from the one before, if any."""
        before: Line | None = None
        for line in self.lines:
            if line.previous != digest(before):
                return line.n
            before = line
        return None


def digest(line: Line | None) -> str:
    """SHA-256 of a line as it stands in the file; zeros before the first."""
    return hashlib.sha256(_dump(line).encode()).hexdigest() if line else FIRST


def _dump(line: Line) -> str:
    return line.model_dump_json(exclude_defaults=True)


def _read(path: Path, *, mend: bool) -> Iterator[Line]:
    """Lines of a file; a last line that was cut short by a kill is dropped (and mended away)."""
    if not path.is_file():
        return
    whole, _, rest = path.read_bytes().rpartition(b"\n")
    if rest and mend:
        os.truncate(path, len(whole) + 1 if whole else 0)
    for number, text in enumerate(whole.splitlines()):
        try:
            yield Line.model_validate(json.loads(text))
        except ValueError as error:
            raise InputError(f"{path.name}: line {number} is damaged ({error})") from None

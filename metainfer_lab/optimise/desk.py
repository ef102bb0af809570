"""The folder of an author of changes (provider `file`), and of an agent that works on its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2

from metainfer_lab.agent.desk import Desk, described, mirror
from metainfer_lab.agent.providers import stream_response
from metainfer_lab.agent.tools import EDITOR, PROPOSE, REMOVE
from metainfer_lab.agent.transcript import Block
from metainfer_lab.engine.manifest import FILE as MANIFEST
from metainfer_lab.optimise.records import Proposal
from metainfer_lab.optimise.tools import inputs
from metainfer_lab.paths import tree_files, tree_hash, write_atomic

AUTHOR = """\
# How to make this engine faster

You are the author of changes. The program that judges them writes `request-NNNN.md` here (and the
same as `request-NNNN.json`) and waits for your answer, `reply-NNNN.json`. Everything you may use is
in this folder and in your own head. Look at nothing else on this machine: not at the program, not
at other engines, not at the sources of libraries that contain models.

    spec.yaml        what the engine serves; run.txt: the run's id, which engine.json keeps
    skills/          every skill of this spec
    engine/          the tree that this attempt began with, and what you have changed of it
    draft/           yours; put back to engine/ whenever an attempt begins
    ledger.tsv       every attempt so far; diffs/ holds their diffs, losses included
    checkpoint/      the model's files (read only)
    reply.py         turns your draft into a reply

## An attempt

1. Read the newest request: where a step's time goes, what was tried, which tree you stand on.
2. Change files in `draft/`: one idea. Try it as you like (any Python with torch, numpy and
   safetensors); timings of your own are guidance, the program's decide.
3. `python3 reply.py --propose "what was changed and why it should be faster" --ratio 1.05`: every
   file of `draft/` that differs from `engine/` becomes an edit, then the change is judged.
   `--ratio` is the decode rate that you predict, new over old; `--assumes FILE` (again for more)
   names files whose present text the idea rests on. Before that, or in replies of their own:
   `--gate NAME`, `--bash "command"`, `--measure` (four quick blocks against the tree you began
   with), `--skill NAME`, `--text "..."`.
4. `python3 reply.py --wait` returns when the next request is there: the row that came of it, and
   the next attempt. A reply that cannot be taken is answered by `reply-NNNN.error.txt`.

A proposal is started once, asked by the cheap gates, timed in turn with the tree that it began
from until an interval decides, held to the guards, and asked by every gate. The program ends by a
rule of its own (attempts, plateau, roofline reached); `state.txt` then says so.

## Tools

"""


@dataclass
class OptimiserDesk(Desk):
    """home: the run's folder, whose ledger and diffs are shown."""

    home: Path = Path()
    attempt: Callable[[], str] = lambda: ""

    def guide(self) -> str:
        """How to propose."""
        return AUTHOR + described(inputs(), writes=True)

    def refresh(self) -> None:
        """Bring everything up to date; a new attempt begins with a fresh draft."""
        super().refresh()
        write_atomic(self.folder / "ledger.tsv", (self.home / "ledger.tsv").read_text())
        for path in sorted((self.home / "diffs").glob("*.diff")):
            write_atomic(self.folder / "diffs" / path.name, path.read_text())
        marker, now = self.folder / "attempt.txt", self.attempt() + "\n"
        if not marker.is_file() or marker.read_text() != now:
            mirror(self.engine, self.folder / "draft")
            write_atomic(marker, now)


class OneProposal(httpx2.BaseTransport):
    """Answers one request with the difference between the run's tree and an agent's folder.

    engine: the run's own folder; theirs: where the agent works.
    """

    def __init__(self, engine: Path, theirs: Path, run_id: str, proposal: Proposal) -> None:
        self.engine, self.theirs, self.run_id = engine, theirs, run_id
        self.proposal, self.asked = proposal, False

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        body = json.loads(request.content)
        self.asked = True
        edits = changes(self.engine, self.theirs, self.run_id)
        content = [*edits, _call(PROPOSE, self.proposal.model_dump())]
        for number, block in enumerate(content):
            block["id"] = f"toolu_{tree_hash(self.theirs)[:12]}_{number:03d}"
        reply = {"content": content, "stop_reason": "tool_use", "model": body["model"]}
        return stream_response(reply)


def changes(ours: Path, theirs: Path, run_id: str) -> list[Block]:
    """Edits that make one tree equal to another, whose engine.json keeps naming the run."""
    old = {path.relative_to(ours).as_posix(): path.read_text() for path in tree_files(ours)}
    new = {edit["path"]: edit for edit in as_edits(theirs, run_id)}
    edits = [_call(EDITOR, e) for name, e in new.items() if old.get(name) != e["file_text"]]
    return edits + [_call(REMOVE, {"path": name}) for name in sorted(old.keys() - new.keys())]


def as_edits(folder: Path, run_id: str) -> Iterator[dict[str, str]]:
    """Edits that write an engine's files anew, its engine.json naming the run."""
    for path in tree_files(folder):
        name, text = path.relative_to(folder).as_posix(), path.read_text()
        if name == MANIFEST:
            text = json.dumps(json.loads(text) | {"run": run_id}, indent=2) + "\n"
        yield {"command": "create", "path": name, "file_text": text}


def _call(name: str, given: dict) -> Block:
    return {"type": "tool_use", "name": name, "input": given}

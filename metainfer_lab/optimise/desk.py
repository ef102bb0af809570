"""The folder of an author of changes (provider `file`), and of an agent that works on its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import httpx2

from metainfer_lab.agent.desk import Desk, mirror
from metainfer_lab.agent.providers import stream_response
from metainfer_lab.agent.tools import PROPOSE, REMOVE, calls, creations, texts
from metainfer_lab.engine.manifest import FILE as MANIFEST
from metainfer_lab.optimise.records import Proposal
from metainfer_lab.paths import tree_hash, write_atomic
from metainfer_lab.skills import Role

if TYPE_CHECKING:
    from metainfer_lab.optimise.loop import Search

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
    """A desk that shows the ledger and every diff as well."""

    loop: Search
    guides: ClassVar[dict[Role, str]] = {"implementer": AUTHOR}

    def replies(self) -> int:
        """One less than were recorded: for the start's files nobody was asked."""
        return super().replies() - 1

    def refresh(self) -> None:
        """Bring everything up to date; a new attempt begins with a fresh draft."""
        super().refresh()
        home = self.loop.home
        for path in (home / "ledger.tsv", *sorted((home / "diffs").glob("*.diff"))):
            write_atomic(self.folder / path.relative_to(home), path.read_text())
        marker, now = self.folder / "attempt.txt", self.loop.transcript.lines[-1].phase + "\n"
        if not marker.is_file() or marker.read_text() != now:
            mirror(self.loop.tools.engine, self.folder / "draft")
            write_atomic(marker, now)


class OneProposal(httpx2.BaseTransport):
    """Answers one request with the difference between the run's tree and an agent's folder.

    engine: the run's own folder; theirs: where the agent works.
    """

    def __init__(self, engine: Path, theirs: Path, run_id: str, proposal: Proposal) -> None:
        self.engine, self.theirs, self.run_id = engine, theirs, run_id
        self.proposal, self.asked = proposal, False

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self.asked = True
        old, new = texts(self.engine), files_of(self.theirs, self.run_id)
        edits = creations({name: text for name, text in new.items() if old.get(name) != text})
        edits += [(REMOVE, {"path": name}) for name in sorted(old.keys() - new.keys())]
        made = [*edits, (PROPOSE, self.proposal.model_dump())]
        content = calls(made, f"toolu_{tree_hash(self.theirs)[:12]}")
        model = json.loads(request.content)["model"]
        return stream_response({"content": content, "stop_reason": "tool_use", "model": model})


def files_of(folder: Path, run_id: str) -> dict[str, str]:
    """An engine's files, name -> text, its engine.json naming the run."""
    files = texts(folder)
    files[MANIFEST] = json.dumps(json.loads(files[MANIFEST]) | {"run": run_id}, indent=2) + "\n"
    return files

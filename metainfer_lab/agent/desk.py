"""Where the author or the reviewer of a `file` run works: requests, spec, skills, the engine.

It holds nothing of the gates, the oracle or other engines.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from metainfer_lab.agent.providers import FileTransport, client
from metainfer_lab.agent.tools import Tools, in_words
from metainfer_lab.paths import tree_files, write_atomic
from metainfer_lab.skills import Role, Skill, as_markdown, reachable

if TYPE_CHECKING:
    import anthropic

    from metainfer_lab.agent.loop import Loop

SHARED: dict[Role, str] = {
    "implementer": "- `str_replace_based_edit_tool` {command: view | create | str_replace | insert,"
    " path, ...}\n- `bash` {command}: a shell command in the sandbox",
    "reviewer": "- `str_replace_based_edit_tool` {command: view, path}",
}
REPLY_SCRIPT = Path(__file__).with_name("reply_script.py")
AUTHOR = """\
# How to write this engine

You are the author. The program that runs the gates writes `request-NNNN.md` here (and the same as
`request-NNNN.json`, the whole Messages API request) and waits for your answer, `reply-NNNN.json`.
Everything you may use is in this folder and in your own head: the spec, the skills, public
formulas. Look at nothing else on this machine: not at the program, not at other engines, not at
the sources of libraries that contain models.

    spec.yaml        what the engine must do; run.txt: the run's id, for engine.json
    skills/          every skill of this spec; requests quote those of their phase
    engine/          the engine as the program holds it, a copy made with each request
    draft/           yours: write the engine here
    checkpoint/      the model's files (read only)
    reply.py         turns your draft into a reply

## A round

1. Read the newest request (results of your calls; on the first, rules and task).
2. Write or change files in `draft/` (it starts equal to `engine/`).
3. `python3 reply.py --gate logits --gate decode --submit`: every file of `draft/` that differs
   from `engine/` becomes a `create` call (a file that is gone a `remove_file` call), then
   `run_gate`, then `submit_phase`. Options: `--text "..."` (what you want to say), `--gate NAME`
   (again for more), `--bash "command"` (runs in the sandbox on the changed files, before the
   gates), `--skill NAME`, `--inspect [KERNEL ...] --target sm_100a` (for a GPU), `--measure`,
   `--submit`, `--no-files`.
4. Wait for the next `request-NNNN.md`: `python3 reply.py --wait` returns when it is there. A
   reply that cannot be taken is answered by `reply-NNNN.error.txt`; write it again.

Many calls in one reply are welcome: all files, gates and the submission at once. A phase begins
with a fresh request; what the reply that passed the one before gave besides (gates, measurements)
stands at its head. You need not use
reply.py: any `reply-NNNN.json` that holds a list of content blocks will do, for example

    [{"type": "text", "text": "why"},
     {"type": "tool_use", "name": "str_replace_based_edit_tool",
      "input": {"command": "create", "path": "__init__.py", "file_text": "..."}},
     {"type": "tool_use", "name": "submit_phase", "input": {}}]

Trying your draft yourself is allowed (any Python with torch, numpy and safetensors); what counts
is the verdict. The program ends when the last phase has passed, or at a limit; `state.txt` then
says so.

## Tools

"""
REVIEWER = """\
# How to review this engine

You are the reviewer. Somebody else writes the engine; you have never read a word of theirs but the
code, and look at nothing beyond this folder. The program that runs the gates writes
`request-NNNN.md` here whenever a phase has passed its gates, and waits for your answer.

    spec.yaml        what the engine must do
    skills/          every skill of this spec, those on failures included
    engine/          the engine as it stands, a copy made with each request
    reply.py         turns your findings into a reply

Read the request and every file in `engine/`. Write your findings into a file, a JSON list of

    {"file": "model.py", "line": 41, "skill": "dense-decoder", "expected": "...", "actual": "..."}

and run `python3 reply.py --review FILE`; a file that holds `[]` approves. `python3 reply.py --wait`
returns when there is another request. A reply that cannot be taken is answered by
`reply-NNNN.error.txt`. The program ends with the run; `state.txt` then says how.

## Tools

"""


@dataclass
class Desk:
    """A role's folder beside a loop; it is brought up to date before each request."""

    folder: Path
    loop: Loop
    role: Role = "implementer"
    guides: ClassVar[dict[Role, str]] = {"implementer": AUTHOR, "reviewer": REVIEWER}

    def client(self) -> anthropic.Anthropic:
        """A client whose replies come from the folder, which is told how the run ends."""
        self.loop.closing.append(self.close)
        return client(FileTransport(self.folder, self.replies, self.refresh))

    def replies(self) -> int:
        """How many requests have been answered here."""
        return len(self.loop.transcript.replies(self.role))

    def refresh(self) -> None:
        """Write what the role reads, and mirror the engine's files."""
        number = self.replies() + 1
        self.loop.say(f"{self.role}: {self.folder} waits for reply-{number:04d}.json")
        spec, reviews = self.loop.spec, self.role == "reviewer"
        guide = self.guides[self.role] + described(self.loop.tools, self.role)
        write_atomic(self.folder / "author.md", guide)
        write_atomic(self.folder / "spec.yaml", spec.to_yaml())
        write_atomic(self.folder / "run.txt", f"{self.loop.run_id}\n")
        write_atomic(self.folder / "reply.py", REPLY_SCRIPT.read_text())
        write_skills(self.folder / "skills", reachable(spec), failures=reviews)
        mirror(self.loop.tools.engine, self.folder / "engine")
        if not reviews:
            self._lay_out_draft()

    def _lay_out_draft(self) -> None:
        link = self.folder / "checkpoint"
        if not link.is_symlink():
            link.symlink_to(self.loop.tools.checkpoint())
        if not (self.folder / "draft").exists():
            mirror(self.loop.tools.engine, self.folder / "draft")

    def close(self, text: str) -> None:
        """Say how the run ended."""
        mirror(self.loop.tools.engine, self.folder / "engine")
        write_atomic(self.folder / "state.txt", text + "\n")


def write_skills(folder: Path, skills: Iterable[Skill], *, failures: bool = False) -> None:
    """One folder a skill; in a run, failure skills are left out until a gate has failed."""
    for skill in skills:
        if failures or skill.layer != "failures":
            write_atomic(folder / skill.name / "SKILL.md", as_markdown(skill))


def mirror(source: Path, target: Path) -> None:
    """Make `target` hold the files of `source` and no others."""
    names = {path.relative_to(source) for path in tree_files(source)}
    target.mkdir(parents=True, exist_ok=True)
    for path in tree_files(target):
        if path.relative_to(target) not in names:
            path.unlink()
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def described(tools: Tools, role: Role) -> str:
    """A role's tools in words."""
    own = [
        f"- `{name}` {{{', '.join(model.model_fields)}}}: {in_words(model)}"
        for name, model in tools.inputs[role].items()
    ]
    return "\n".join([SHARED[role], *own]) + "\n"

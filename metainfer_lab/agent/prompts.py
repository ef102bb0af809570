"""What the author of an engine reads: the rules, a phase's task, verdicts in words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metainfer_lab.agent.editor import listed
from metainfer_lab.agent.phases import Phase
from metainfer_lab.skills import Skill
from metainfer_lab.spec import Spec

MAX_RESULT = 12_000  # characters of a tool's output that are passed on

SYSTEM = """\
You write an inference engine from a blank sheet: a small Python package that does what one spec
asks, for one model family, and nothing else. You work in phases. A phase ends only by a verdict
of gates that neither you nor the program that talks to you can influence: they run your engine in
a sandbox on inputs drawn on the spot and compare it with an oracle. Saying that something works
counts for nothing; submit_phase does.

Rules
- Write from the spec, the skills and public formulas. No text is copied from an existing engine
  or library; a finished engine is checked for long verbatim overlap. Use no knowledge of what the
  gates draw; they draw something else each time.
- Paths are relative to the engine folder. Every change to it goes through
  str_replace_based_edit_tool and remove_file.
- bash runs in a sandbox: the engine folder is its working directory, read-only; python there has
  torch, triton, safetensors and numpy, and `import engine` finds the engine; write to $TMPDIR;
  each call is a new shell, of two minutes at most. The checkpoint's folder is $CHECKPOINT. Use it
  to try the code, to measure, to look at torch's signatures.
- inspect_kernel says what the compiler made of a kernel for H200 or B200; no GPU is needed.
- run_gate runs gates on the engine as it stands; it costs no attempt. submit_phase runs those of
  the phase and of all earlier ones; it must be the last call of a reply.
- Several tool calls in one reply are carried out in order: write all files, run the gates and
  submit in one go.
- When a gate fails, find out why before changing anything: read the case, the position, the error
  beside the tolerance. Never weaken a check of your own to get through, never special-case what a
  gate seems to ask.
"""


def task(phase: Phase, phases: Sequence[Phase], earlier: str = "") -> str:
    """A phase's task, among all the phases that there are; earlier: what came before."""
    ends = f"It ends when these gates pass: {', '.join(phase.all_gates)}"
    ends += f" (new here: {', '.join(phase.gates)})." if phase.regression_gates else "."
    order = f"## All phases, in order\n{in_order(phases)}"
    head = f"# Phase `{phase.name}`: {phase.goal}"
    return "\n\n".join(part for part in (head, ends, earlier, order) if part)


def in_order(phases: Sequence[Phase]) -> str:
    """Phases with their goals and gates, one a line."""
    return "\n".join(f"- {p.name}: {p.goal} ({', '.join(p.gates)})" for p in phases)


def opening(
    task: str,
    spec: Spec,
    run_id: str,
    skills: Sequence[Skill],
    others: Sequence[Skill],
    engine: Path,
) -> str:
    """The first message of a context: task, spec, files, skills in full, others by name."""
    parts = [
        task,
        f"## Spec (run id `{run_id}`)\n```yaml\n{spec}\n```",
        f"## Engine folder\n{listed(engine, engine, '(empty: a blank sheet)')}",
        "## Skills\n" + "\n\n".join(f"### {s.name}\n{s.body}" for s in skills),
    ]
    if others:
        names = "\n".join(f"- {s.name}: {s.description}" for s in others)
        parts.append(f"## More skills (read_skill shows them)\n{names}")
    return "\n\n".join(parts)


NO_CALL = (
    "Nothing was submitted. A phase ends only by a verdict: go on with tool calls, and call "
    "submit_phase when the phase's gates should pass."
)
CUT_OFF = (
    "The reply was cut off at its token limit; this call was not carried out. Send it again in "
    "smaller parts."
)
NOT_LAST = "A submission ends a reply: calls after it were not carried out."


def clip(text: str, limit: int = MAX_RESULT) -> str:
    """Text whose middle is cut out where it is longer than a tool result may be."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - limit} characters cut ...]\n{text[-half:]}"


def readable_request(body: dict[str, Any], number: int) -> str:
    """What is new in a request, for an author who reads files: rules and task once."""
    messages = body["messages"]
    parts = [f"# Request {number:04d} (answer in reply-{number:04d}.json; author.md says how)"]
    if len(messages) == 1:
        parts.append("\n".join(block["text"] for block in body["system"]))
    said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    parts += map(_readable_message, messages[said[-1] + 1 if said else 0 :])
    return "\n\n".join(parts) + "\n"


def _readable_message(message: dict[str, Any]) -> str:
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return "\n\n".join(_readable_block(block) for block in blocks)


def _readable_block(block: dict[str, Any]) -> str:
    if block["type"] == "text":
        return block["text"]
    mark = "error" if block.get("is_error") else "result"
    return f"[{mark} of {block['tool_use_id']}]\n{block['content']}"

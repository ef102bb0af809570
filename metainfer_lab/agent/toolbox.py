"""For a coding agent of one's own: a workspace to write in, and `adopt` for what it left."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from metainfer_lab.agent import run as runs
from metainfer_lab.agent.budget import Budget
from metainfer_lab.agent.desk import write_skills
from metainfer_lab.agent.generation import finish, new_run, tools_of
from metainfer_lab.agent.loop import Loop
from metainfer_lab.agent.phases import ADOPTED, adopted_phase, phases
from metainfer_lab.agent.providers import NoTransport, client
from metainfer_lab.agent.run import Run
from metainfer_lab.agent.tools import EDITOR, SUBMIT, Judge, real_judge
from metainfer_lab.agent.transcript import FILE, Block, Transcript
from metainfer_lab.agent.watch import say_plainly
from metainfer_lab.errors import InputError
from metainfer_lab.paths import ROOT, tree_files, write_atomic
from metainfer_lab.skills import config_of, reachable
from metainfer_lab.spec import Spec

GUIDE = """\
# Write an inference engine

Write, in `engine/`, the engine that `spec.yaml` asks for. Begin with the skill `engine-contract`;
all skills are in `.claude/skills/`, each says when it is needed.

- From a blank sheet: the spec, the skills and public formulas are what you write from. Copy nothing
  from existing engines or libraries, and look at none (a finished engine is checked for long
  verbatim overlap), nor at the sources of the gates: they draw other inputs each time.
- `./verify` asks all gates, `./verify --gates weights,logits` some. They alone decide. The order:
{order}
- `engine/engine.json` names the spec `{spec}` and the run `{run}`.
- Once every gate passes, `./optimise` measures the engine as the start of a ledger; from then on
  `./optimise --propose "what was changed, why it should be faster" --ratio 1.05` judges `engine/`
  as it stands: gates, runs in turn with the tree it was changed from, keep or discard, one row with
  its diff. `next/` then holds the tree that the next change begins with. Never write a row by hand.

The work is finished when `./verify` says `passed`; `metainfer-lab adopt FOLDER` then records it.
"""
COMMAND = """\
#!/bin/sh
# {about}
here=$(cd "$(dirname "$0")" && pwd)
cd '{root}' && exec '{python}' -m metainfer_lab {verb} "$here/engine" {options} "$@"
"""
INSPECT = """\
#!/bin/sh
# What the compiler made of the kernels that engine/inspection.py declares: [KERNEL] [--target T]
here=$(cd "$(dirname "$0")" && pwd)
cd '{root}' && exec '{python}' -m metainfer_lab.inspection "$here/engine" --config '{config}' "$@"
"""
COMMANDS = {
    "verify": ("Ask the gates about the engine in this folder.", '--spec "$here/spec.yaml"'),
    "optimise": ("Judge a change to the engine in this folder.", "--provider external"),
}


def workspace(spec: Spec | str, folder: str | Path) -> Path:
    """Lay out a blank folder: spec, skills, guide; `verify`, `optimise`, for a GPU `inspect`.

    InputError when the folder holds anything already.
    """
    spec = spec if isinstance(spec, Spec) else Spec.load(spec)
    folder = Path(folder).resolve()
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"folder {folder}: is not empty; a workspace begins as a blank sheet")
    name = runs.next_id(spec.id, "a")
    order = "\n".join(f"  {p.name}: {p.goal} ({', '.join(p.gates)})" for p in phases(spec))
    guide = GUIDE.format(order=order, spec=spec.id, run=name)
    (folder / "engine").mkdir(parents=True)
    write_atomic(folder / "spec.yaml", spec.to_yaml())
    write_atomic(folder / "run.txt", f"{name}\n")
    write_atomic(folder / "AGENTS.md", guide)
    write_atomic(folder / "CLAUDE.md", "@AGENTS.md\n")
    write_skills(folder / ".claude" / "skills", reachable(spec), failures=True)
    for verb, (about, options) in COMMANDS.items():
        given = {"about": about, "options": options, "root": ROOT, "python": sys.executable}
        write_atomic(folder / verb, COMMAND.format(verb=verb, **given))
        (folder / verb).chmod(0o755)
    if spec.hardware != "cpu":
        given = {"root": ROOT, "python": sys.executable, "config": config_of(spec)}
        write_atomic(folder / "inspect", INSPECT.format(**given))
        (folder / "inspect").chmod(0o755)
    return folder


def adopt(folder: str | Path, *, judge: Judge | None = None) -> Run:
    """Verify the engine that an agent left in a workspace and make it a run of provider `external`.

    The run's record holds the files as one turn: the agent's own turns are not known. `record`
    publishes it.
    """
    folder = Path(folder).resolve()
    for part in ("spec.yaml", "run.txt", "engine/engine.json"):
        if not (folder / part).is_file():
            raise InputError(
                f"{folder / part}: missing; adopt takes a folder laid out by workspace"
            )
    spec, name = Spec.load(folder / "spec.yaml"), (folder / "run.txt").read_text().strip()
    _check_name(folder / "engine" / "engine.json", name)
    judge = judge or real_judge(spec)
    shutil.rmtree(runs.LOCAL_RUNS / name, ignore_errors=True)  # an adoption that did not pass
    home = new_run(spec, "external", name)
    with runs.locked(home):
        loop = _loop(spec, home, judge)
        loop.open(loop.phases[0], conversation=0, earlier="")
        loop.append(
            conversation=0,
            phase=ADOPTED,
            attempt=1,
            message={"role": "assistant", "content": list(_calls(folder / "engine"))},
            stop_reason="tool_use",
        )
        if (folder / "ledger.tsv").is_file():
            write_atomic(home / "ledger.tsv", (folder / "ledger.tsv").read_text())
        return finish(loop, home)


def _check_name(path: Path, name: str) -> None:
    earlier = [r for r in runs.runs() if r.id == name]
    if any(r.folder.parent == runs.RUNS or r.info.status == "passed" for r in earlier):
        raise InputError(f"run {name}: is adopted already; lay out a new workspace for more")
    try:
        said = json.loads(path.read_text()).get("run")
    except (ValueError, AttributeError):
        raise InputError(f"{path}: is not a JSON object") from None
    if said != name:
        raise InputError(f"{path}: run is {said!r}; it must be {name!r}, as run.txt says")


def _calls(engine: Path) -> list[Block]:
    files = [(p.relative_to(engine).as_posix(), p.read_text()) for p in tree_files(engine)]
    inputs = [{"command": "create", "path": name, "file_text": text} for name, text in files]
    calls = [(EDITOR, given) for given in inputs] + [(SUBMIT, {})]
    return [
        {"type": "tool_use", "id": f"toolu_{i:04d}", "name": name, "input": given}
        for i, (name, given) in enumerate(calls)
    ]


def _loop(spec: Spec, home: Path, judge: Judge) -> Loop:
    return Loop(
        spec=spec,
        run_id=home.name,
        phases=[adopted_phase(judge.gates)],
        transcript=Transcript(home / FILE, writable=True),
        tools=tools_of(spec, home, judge, say_plainly),
        client=client(NoTransport()),
        model="",
        effort=None,
        budget=Budget(attempts=1),
        say=say_plainly,
    )

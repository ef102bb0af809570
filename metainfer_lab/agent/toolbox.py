"""For a coding agent of one's own: a workspace to write in, and `adopt` for what it left."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from metainfer_lab.agent import run as runs
from metainfer_lab.agent.budget import Budget
from metainfer_lab.agent.desk import write_skills
from metainfer_lab.agent.generation import finish, loop_of, new_run
from metainfer_lab.agent.phases import ADOPTED, adopted_phase, phases
from metainfer_lab.agent.prompts import in_order
from metainfer_lab.agent.run import Run
from metainfer_lab.agent.tools import (
    SUBMIT,
    Judge,
    brought,
    calls,
    creations,
    real_judge,
    texts,
)
from metainfer_lab.agent.watch import say_plainly
from metainfer_lab.errors import InputError
from metainfer_lab.paths import ROOT, write_atomic
from metainfer_lab.skills import config_of, reachable
from metainfer_lab.spec import Spec

GUIDE = """\
# Write an inference engine

Write, in `engine/`, the engine that `spec.yaml` asks for. Begin with the skill `engine-contract`;
all skills are in `.claude/skills/`, each says when it is needed.

- From a blank sheet: the spec, the skills and public formulas are what you write from. Copy nothing
  from existing engines or libraries, and look at none (a finished engine is checked for long
  verbatim overlap), nor at the sources of the gates: they draw other inputs each time.
- `./verify` asks all gates, `./verify --gates weights,logits` some. They alone decide.
- `engine/engine.json` names the spec `{spec}` and the run `{run}`.
- Once every gate passes, `./optimise` measures the engine as the start of a ledger; from then on
  `./optimise --propose "what was changed, why it should be faster" --ratio 1.05` judges `engine/`
  as it stands: gates, runs in turn with the tree it was changed from, keep or discard, one row with
  its diff. `next/` then holds the tree that the next change begins with. Never write a row by hand.

The phases, in order, each with the gates that it adds:
{order}

The work is finished when `./verify` says `passed`; `metainfer-lab adopt FOLDER` then records it.
"""
COMMAND = """\
#!/bin/sh
# {about}
here=$(cd "$(dirname "$0")" && pwd)
cd '{root}' && exec '{python}' -m {module} "$here/engine" {options} "$@"
"""
VERIFY = ("Ask the gates about the engine in this folder.", '--spec "$here/spec.yaml"')
OPTIMISE = ("Judge a change to the engine in this folder.", "--provider external")
INSPECT = "What the compiler made of engine/inspection.py's kernels: [KERNEL] [--target T]"


def workspace(spec: Spec | str, folder: str | Path) -> Path:
    """Lay out a blank folder: spec, skills, guide; `verify`, `optimise`, for a GPU `inspect`.

    InputError when the folder holds anything already.
    """
    spec = spec if isinstance(spec, Spec) else Spec.load(spec)
    folder = Path(folder).resolve()
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"folder {folder}: is not empty; a workspace begins as a blank sheet")
    name = runs.next_id(spec.id, "a")
    guide = GUIDE.format(order=in_order(phases(spec)), spec=spec.id, run=name)
    (folder / "engine").mkdir(parents=True)
    write_atomic(folder / "spec.yaml", spec.to_yaml())
    write_atomic(folder / "run.txt", f"{name}\n")
    write_atomic(folder / "AGENTS.md", guide)
    write_atomic(folder / "CLAUDE.md", "@AGENTS.md\n")
    write_skills(folder / ".claude" / "skills", reachable(spec), failures=True)
    _command(folder / "verify", "metainfer_lab verify", *VERIFY)
    _command(folder / "optimise", "metainfer_lab optimise", *OPTIMISE)
    if spec.hardware != "cpu":
        config = f"--config '{config_of(spec)}'"
        _command(folder / "inspect", "metainfer_lab.inspection", INSPECT, config)
    return folder


def _command(path: Path, module: str, about: str, options: str) -> None:
    given = {"module": module, "about": about, "options": options}
    write_atomic(path, COMMAND.format(root=ROOT, python=sys.executable, **given))
    path.chmod(0o755)


def adopt(folder: str | Path, *, verdict: Path | None = None, judge: Judge | None = None) -> Run:
    """Verify the engine that an agent left in a workspace and make it a run of provider `external`.

    The run's record holds the files as one turn: the agent's own turns are not known. `record`
    publishes it. verdict: a file that holds one of this tree, given where the spec's GPU is.
    """
    folder = Path(folder).resolve()
    for part in ("spec.yaml", "run.txt", "engine/engine.json"):
        if not (folder / part).is_file():
            raise InputError(
                f"{folder / part}: missing; adopt takes a folder laid out by workspace"
            )
    spec, name = Spec.load(folder / "spec.yaml"), (folder / "run.txt").read_text().strip()
    _check_name(folder / "engine" / "engine.json", name)
    judge = judge or (brought(verdict, folder / "engine") if verdict else real_judge(spec))
    shutil.rmtree(runs.LOCAL_RUNS / name, ignore_errors=True)  # an adoption that did not pass
    home = new_run(spec, "external", name)
    with runs.locked(home):
        phases = [adopted_phase(judge.gates)]
        loop = loop_of(home, judge, Budget(attempts=1), say_plainly, phases=phases)
        loop.open(loop.phases[0], conversation=0)
        content = calls([*creations(texts(folder / "engine")), (SUBMIT, {})])
        message, where = {"role": "assistant", "content": content}, {"phase": ADOPTED, "attempt": 1}
        loop.append(message=message, stop_reason="tool_use", conversation=0, **where)
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

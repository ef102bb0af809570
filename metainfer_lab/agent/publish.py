"""From data/local into the record: the one way in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from metainfer_lab.agent import run as runs
from metainfer_lab.agent.loop import rebuild
from metainfer_lab.agent.run import Run
from metainfer_lab.bench.publish import publish
from metainfer_lab.errors import InputError
from metainfer_lab.paths import tree_hash, write_atomic

if TYPE_CHECKING:
    import pandas as pd


def record(name: str, *, engine: bool = False) -> Run | pd.DataFrame:
    """Publish a finished local run; with `engine`, its last tree as the spec's engine.

    The name of a CSV that `bench` saved publishes those rows, their raw samples and their verdict.
    """
    if name.endswith(".csv"):
        return publish(Path(name))
    source = runs.LOCAL_RUNS / name
    if not (source / "run.json").is_file():
        raise InputError(f"run {name}: not among the local runs; there are {_local_names()}")
    run = Run(source)
    broken = run.transcript.broken_link()
    if run.info.status == "running" or broken is not None:
        what = "still goes on" if broken is None else f"has a broken chain at line {broken}"
        raise InputError(f"run {name}: {what}; only a finished, whole run is recorded")
    _publish(source, runs.RUNS / name)
    if engine:
        publish_engine(run)
    return Run(runs.RUNS / name)


def _publish(source: Path, target: Path) -> None:
    made = target.with_name(f".{target.name}.new")
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(source, made, ignore=shutil.ignore_patterns("engine", "lock"))
    if target.is_dir() and not (target / "run.json").is_file():  # kept while an engine was tuned
        for kept in target.iterdir():
            if not (made / kept.name).exists():
                shutil.copytree(kept, made / kept.name) if kept.is_dir() else shutil.copy(
                    kept, made
                )
    shutil.rmtree(target, ignore_errors=True)
    made.replace(target)


def publish_engine(run: Run) -> Path:
    """Make data/engines/<spec> the run's last tree, and list its hash among the recorded ones."""
    if run.info.status != "passed":
        raise InputError(f"run {run.id}: did not pass, so its engine serves nobody")
    target = runs.ENGINES / run.info.spec
    made = target.with_name(f".{target.name}.new")
    rebuild(run.transcript.lines, made)
    shutil.rmtree(target, ignore_errors=True)
    made.replace(target)
    trees = runs.ENGINES / "trees.json"
    known = json.loads(trees.read_text()) if trees.is_file() else {}
    known[target.name] = tree_hash(target)
    write_atomic(trees, json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    return target


def _local_names() -> str:
    return ", ".join(sorted(p.parent.name for p in runs.LOCAL_RUNS.glob("*/run.json"))) or "none"

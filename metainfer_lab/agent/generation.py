"""`generate`: have an engine written for a spec, or go on with a run that was interrupted."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from metainfer_lab.agent import run as runs
from metainfer_lab.agent.budget import Budget, BudgetSpent, cost
from metainfer_lab.agent.desk import Desk
from metainfer_lab.agent.inspector import inspected
from metainfer_lab.agent.loop import Loop, Stopped
from metainfer_lab.agent.overlap import overlaps
from metainfer_lab.agent.phases import phases as phases_of
from metainfer_lab.agent.providers import NoTransport, client
from metainfer_lab.agent.run import Run, RunInfo
from metainfer_lab.agent.tools import Judge, Tools, measured, real_judge
from metainfer_lab.agent.transcript import FILE, Transcript
from metainfer_lab.agent.watch import view
from metainfer_lab.errors import InputError
from metainfer_lab.paths import write_atomic
from metainfer_lab.skills import config_of, load_skills
from metainfer_lab.spec import Spec

Provider = Literal["replay", "file", "anthropic"]
MODEL, EFFORT = "claude-opus-5-5", "high"
NOT_STATED = "not-stated"
NO_REVIEWER = "none"


def generate(
    spec: Spec | str,
    provider: Provider = "replay",
    *,
    folder: str | Path | None = None,
    phases: list[str] | None = None,
    run_id: str | None = None,
    fresh: bool = False,
    reviewer: str | Path | None = None,
    model: str = MODEL,
    effort: str | None = EFFORT,
    budget_usd: float | None = None,
    turns: int = 300,
    attempts: int = 8,
    rejections: int = 3,
    wall_s: float | None = None,
    tokens: int | None = None,
    on_event: Callable[[str], None] | None = None,
    judge: Judge | None = None,
    **connection: Any,
) -> Run:
    """Have an engine written for a spec; the run, passed or stopped (`reason` says why).

    provider: `replay` carries out the spec's recorded run again (gates for real in `phases`, in all
    when None); `file` waits in `folder` for an author's replies; `anthropic` calls the API (needs
    ANTHROPIC_API_KEY and budget_usd). An unfinished run of this spec and provider is gone on with,
    unless `fresh`. reviewer: for `file` the folder where another author reviews (default: none);
    for `anthropic` "api", a fresh context of the same model (the default), or "none". on_event is
    told what happens, a line each (watch.view when None). connection: base_url, timeout and the
    like, passed to the SDK's client.
    """
    spec = spec if isinstance(spec, Spec) else Spec.load(spec)
    if provider not in get_args(Provider):
        known = ", ".join(get_args(Provider))
        raise InputError(f"provider: {provider!r} is none; there are {known}")
    if provider == "replay":
        run = Run.open(run_id or spec.id)
        if run.info.spec != spec.id:
            raise InputError(f"run_id: {run.id} is of {run.info.spec}, not of {spec.id}")
        run.replay(phases=phases, on_event=on_event or view())
        return run
    limits = {"attempts": attempts, "rejections": rejections, "wall_s": wall_s, "tokens": tokens}
    limits = {"attempts": attempts, "rejections": rejections, "wall_s": wall_s, "tokens": tokens}
    budget = Budget.of(turns=turns, budget_usd=budget_usd, **limits)
    _check_folders(provider, folder, reviewer)
    who = reviewed_by(provider, reviewer)
    check_paid(provider, connection, budget_usd, model)
    about = {"model": model, "effort": effort, "server": connection.get("base_url")}
    home = None if fresh else unfinished(spec.id, "generation", provider, run_id)
    name = home.name if home else run_id or runs.next_id(spec.id)
    _check_desks(name, folder=folder, reviewer=reviewer)
    home = home or new_run(spec, provider, name, reviewer=who, **about)
    if (then := Run(home).info.reviewer) != who:
        raise InputError(f"reviewer: run {home.name} has the reviewer {then!r}; keep it")
    with runs.locked(home):
        loop = loop_of(home, judge or real_judge(spec), budget, on_event or view())
        if provider == "anthropic":
            from anthropic import Anthropic

            loop.client = Anthropic(**connection)
            loop.reviewer = loop.client if who != NO_REVIEWER else None
        else:
            loop.client = Desk(Path(folder).resolve(), loop).client()
            if who != NO_REVIEWER:
                loop.reviewer = Desk(Path(reviewer).resolve(), loop, "reviewer").client()
        return finish(loop, home)


def _check_folders(
    provider: Provider, folder: str | Path | None, reviewer: str | Path | None
) -> None:
    """Before anything is written: a file provider's author and reviewer have a folder each."""
    if provider == "file" and folder is None:
        raise InputError("folder: provider file needs the folder where the author answers")
    if provider == "file" and reviewer and Path(reviewer).resolve() == Path(folder).resolve():
        raise InputError("reviewer: is the author's folder; give it a folder of its own")


def _check_desks(run: str, **desks: str | Path | None) -> None:
    """A desk keeps the run that it was laid out for: replies to another would be taken for its."""
    for field, desk in desks.items():
        owner = Path(desk or "") / "run.txt"
        if desk and owner.is_file() and (then := owner.read_text().strip()) != run:
            raise InputError(f"{field}: {desk} belongs to run {then}; give {run} another folder")


def reviewed_by(provider: Provider, reviewer: str | Path | None) -> str:
    """What a run's record says of its reviewer."""
    given = str(reviewer) if reviewer is not None else {"anthropic": "api"}.get(provider, "none")
    if given == "none":
        return NO_REVIEWER
    if provider == "anthropic":
        if given != "api":
            raise InputError(f"reviewer: {given!r}; with provider anthropic it is api or none")
        return "the author's model, in a context of its own"
    return "coding agent through a folder of its own, model not stated"


def check_paid(
    provider: str, connection: dict[str, Any], usd: float | None, model: str = MODEL
) -> None:
    """Before anything is written: what calls the API has a key, a limit of what it spends, and a
    model whose price is known."""
    if provider != "anthropic":
        return
    if not (os.environ.get("ANTHROPIC_API_KEY") or connection.get("api_key")):
        raise InputError("ANTHROPIC_API_KEY: not set; provider anthropic needs it, others do not")
    if usd is None:
        raise InputError("budget_usd: provider anthropic needs one; say how much may be spent")
    cost(model, {})


def unfinished(spec: str, kind: runs.Kind, provider: str, run_id: str | None) -> Path | None:
    """The folder of the latest local run that a call goes on with."""
    known = [run for run in runs.runs(spec) if run.folder.parent == runs.LOCAL_RUNS]
    for run in reversed(known):
        same = (run.info.kind, run.info.provider) == (kind, provider)
        if same and run.info.status != "passed" and run_id in (None, run.id):
            return run.folder
    return None


def new_run(
    spec: Spec,
    provider: str,
    name: str,
    *,
    model: str = NOT_STATED,
    effort: str | None = None,
    reviewer: str = NO_REVIEWER,
    kind: runs.Kind = "generation",
    server: str | None = None,
) -> Path:
    """The folder of a new run, with its run.json and spec.yaml.

    server: address of what answers in place of the API; which model that is, nobody knows.
    """
    home = runs.LOCAL_RUNS / name
    (home / "verdicts").mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {"author": runs.AUTHORS.get(provider)}
    if provider == "anthropic":
        api = f"the server at {server}, asked for {model}" if server else f"{model} through the API"
        about = {"author": api, "model": model, "effort": effort}
    if provider == "external":
        about["confined_by"] = "nothing known here: the tree was written elsewhere"
    about |= {"id": name, "spec": spec.id, "kind": kind, "provider": provider, "reviewer": reviewer}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    with runs.locked(home):  # of two processes that begin one at once, one does
        if (home / "run.json").exists():
            raise InputError(f"run {name}: exists already; leave run_id out for a new one")
        write_atomic(home / "spec.yaml", spec.to_yaml())
        runs.save(home, RunInfo(created=created, versions=versions(), **about))
    return home


def versions() -> dict[str, str]:
    """What the run was made with."""
    names = ("anthropic", "torch", "transformers", "numpy", "safetensors")
    return {"python": platform.python_version()} | {n: importlib.metadata.version(n) for n in names}


def tools_of(spec: Spec, home: Path, judge: Judge, say: Callable[[str], None]) -> Tools:
    """The tools of a run's folder."""
    return Tools(
        engine=home / "engine",
        verdicts=home / "verdicts",
        skills=load_skills(),
        judge=judge,
        inspect=lambda engine, *asked: inspected(engine, config_of(spec), *asked),
        measure=lambda engine: measured(engine, spec),
        say=say,
        checkpoint=lambda: checkpoint_of(spec),
        names={home: "<run>"},
    )


def loop_of(
    home: Path,
    judge: Judge,
    budget: Budget,
    say: Callable[[str], None],
    kind: type[Loop] = Loop,
    /,
    **more: Any,
) -> Any:
    """The loop of a run's folder, which asks nobody yet. more: what is another than in a new
    generation."""
    run = Run(home)
    given = {
        "phases": phases_of(run.spec, judge.gates) if "phases" not in more else (),
        "transcript": Transcript(home / FILE, writable=True),
        "tools": tools_of(run.spec, home, judge, say),
        "client": client(NoTransport()),
        "model": run.info.model or NOT_STATED,
        "effort": run.info.effort,
        "paid": run.info.provider == "anthropic",
    }
    return kind(spec=run.spec, run_id=run.id, budget=budget, say=say, **(given | more))


def checkpoint_of(spec: Spec) -> Path:
    """The spec's checkpoint folder, fetched when it is first asked for."""
    from metainfer_lab.checkpoints import fetch

    return fetch(spec)


def finish(loop: Loop, home: Path, kind: type[Run] = Run) -> Run:
    """Run the loop to its end and write down how it ended; an interrupted run can go on."""
    run = kind(home)
    run.info.status, run.info.reason = "running", None
    runs.save(home, run.info)
    try:
        loop.run()
        check_blank_sheet(loop.tools.engine)
        run.info.status = "passed"
    except (Stopped, BudgetSpent) as end:
        run.info.status, run.info.reason = "stopped", str(end)
    last = loop.transcript.last
    run.info.tree = last.tree if last else None
    runs.save(home, run.info)
    for close in loop.closing:
        close(str(run))
    return run


def check_blank_sheet(engine: Path) -> None:
    """Stopped when an engine repeats long passages of installed packages or of the skills."""
    found = overlaps(engine)
    if found:
        raise Stopped("blank sheet: " + "; ".join(map(str, found)))

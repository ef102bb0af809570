"""`optimise`: make a right engine faster, or go on with a run that was interrupted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ValidationError

from metainfer_lab.agent import run as runs
from metainfer_lab.agent.budget import Budget, BudgetSpent
from metainfer_lab.agent.desk import mirror
from metainfer_lab.agent.generation import (
    EFFORT,
    MODEL,
    check_paid,
    finish,
    loop_of,
    new_run,
    tools_of,
    unfinished,
)
from metainfer_lab.agent.loop import Stopped, rebuild
from metainfer_lab.agent.providers import client
from metainfer_lab.agent.replay import Report
from metainfer_lab.agent.run import Run
from metainfer_lab.agent.tools import Judge, real_judge
from metainfer_lab.agent.watch import view
from metainfer_lab.engine import Engine
from metainfer_lab.engine.manifest import EngineManifest
from metainfer_lab.errors import InputError
from metainfer_lab.optimise import prompts, search
from metainfer_lab.optimise.bench import Bench, RealBench
from metainfer_lab.optimise.desk import OneProposal, OptimiserDesk
from metainfer_lab.optimise.loop import LEDGER, Search, main_blocks, read_rows
from metainfer_lab.optimise.records import OBJECTIVE, Proposal, Settings, workloads_of
from metainfer_lab.optimise.tools import OptimiserTools
from metainfer_lab.paths import tree_hash, write_atomic
from metainfer_lab.spec import Spec, explain

if TYPE_CHECKING:
    import pandas as pd

Provider = Literal["replay", "file", "anthropic", "external"]
SETTINGS = "settings.json"


class Outcome(BaseModel):
    """What `optimise --json` prints. ratio, ratio_lo, ratio_hi: the last tree over the start, from
    the final measurement; None before that, or where nothing was kept."""

    id: str
    spec: str
    passed: bool
    status: str
    reason: str | None
    provider: str
    attempts: int
    keeps: int
    by_status: dict[str, int]
    best: str | None
    ratio: float | None
    ratio_lo: float | None
    ratio_hi: float | None
    divergences: int
    lines_of_code: int
    cost_usd: float | None
    seconds: float
    tree: str


class Optimisation(Run):
    """A run that makes an engine faster: a run's folder with settings, ledger, diffs, raw files."""

    @property
    def settings(self) -> Settings:
        """What the run is held to."""
        return Settings.model_validate_json((self.folder / SETTINGS).read_text())

    @property
    def rows(self) -> list[search.Row]:
        """The ledger's rows, nulls as None."""
        return read_rows(self.folder / LEDGER)

    @property
    def ledger(self) -> pd.DataFrame:
        """The ledger as it stands."""
        from metainfer_lab.bench import ledger

        return ledger.read(self.folder / LEDGER)

    def gains(self, row: str) -> list[float]:
        """Log-ratios of the decode rate to the row's parent, block by block, as they decided."""
        return [block.gain(OBJECTIVE) for block in main_blocks(self.folder, row)]

    def outcome(self) -> Outcome:
        """Attempts, keeps, the whole gain with its interval."""
        rows, facts = self.rows, self.summary()
        tried = search.attempts(rows)
        last = rows[-1] if rows and rows[-1]["id"] == search.FINAL else {}
        kinds = [row["status"] for row in tried]
        return Outcome(
            attempts=len(tried),
            keeps=kinds.count("keep"),
            by_status={kind: kinds.count(kind) for kind in sorted(set(kinds))},
            best=search.best(rows) if rows else None,
            **{name: last.get(name) for name in ("ratio", "ratio_lo", "ratio_hi")},
            **facts.model_dump(include=set(Outcome.model_fields) - {"attempts"}),
        )

    @property
    def succeeded(self) -> bool:
        """Whether the command's answer is yes: ended by its own rule, replayed without divergence;
        for an agent's folder, kept."""
        if self.info.provider == "external" and self.info.status == "running":
            return self.rows[-1]["status"] == "keep"
        return self.outcome().passed

    def replay(self, rows: Sequence[str] | None = None, **options: Any) -> Report:
        """Follow the record again: trees, decisions, and the gates of `rows` (all keeps: None)."""
        from metainfer_lab.optimise.replay import replay

        self.report = replay(self, rows, **options)
        return self.report

    def model_dump_json(self, indent: int | None = None) -> str:
        """The outcome as JSON."""
        return self.outcome().model_dump_json(indent=indent)

    def __str__(self) -> str:
        facts = self.outcome()
        counts = ", ".join(f"{count} {kind}" for kind, count in facts.by_status.items())
        text = f"optimisation {facts.id}: {facts.status}, {facts.attempts} attempts ({counts})"
        if facts.ratio:
            text += f", {facts.ratio:.3f} ({facts.ratio_lo:.3f}..{facts.ratio_hi:.3f}) of the start"
        newest = f"\n{prompts.outcome(self.rows[-1])}" if self.rows else ""
        return text + newest + (f"\n{facts.reason}" if facts.reason else "")


def optimise(
    engine: Spec | Path | str,
    provider: Provider = "replay",
    *,
    folder: str | Path | None = None,
    propose: Proposal | dict[str, Any] | None = None,
    rows: Sequence[str] | None = None,
    run_id: str | None = None,
    fresh: bool = False,
    model: str = MODEL,
    effort: str | None = EFFORT,
    budget_usd: float | None = None,
    turns: int = 1000,
    wall_s: float | None = None,
    tokens: int | None = None,
    on_event: Callable[[str], None] | None = None,
    judge: Judge | None = None,
    bench: Bench | None = None,
    connection: dict[str, Any] | None = None,
    **settings: Any,
) -> Optimisation:
    """Make an engine faster without making it wrong; what is given is copied, never changed.

    engine: a spec (id or object), an engine's folder, or for `replay` a run's id. provider: `file`
    waits in `folder` for an author's proposals; `anthropic` asks the API (needs a key and
    budget_usd); `external` judges one `propose` of the folder `engine` as an agent left it;
    `replay` follows a record, with the gates of `rows` for real (all keeps when None). An
    unfinished run of this engine and provider is gone on with, unless `fresh`. settings: fields of
    `Settings` (threshold, guard, attempts, patience, blocks, ...), for a new run.
    """
    if provider == "replay":
        run = recorded(run_id or str(engine.id if isinstance(engine, Spec) else engine))
        run.replay(rows, on_event=on_event or view(), judge=judge)
        return run
    opened, proposal = Engine.open(engine), _proposal(propose)
    check_paid(provider, connection or {}, budget_usd)
    if provider == "file" and folder is None:
        raise InputError("folder: provider file needs the folder where the author answers")
    home = None if fresh else unfinished(opened.spec.id, "optimisation", provider, run_id)
    if home:
        _same_settings(Optimisation(home), settings)
    elif provider == "external" and proposal is not None:
        raise InputError(f"optimise {opened.folder}: measure the start first, without --propose")
    home = home or _begun(opened, provider, run_id, settings, model, effort)
    with runs.locked(home):
        budget = Budget(turns=turns, wall_s=wall_s, tokens=tokens, budget_usd=budget_usd)
        loop = _loop(opened, home, budget, judge, bench, on_event or view())
        if provider == "external":
            return _one_proposal(loop, proposal)
        if provider == "anthropic":
            from anthropic import Anthropic

            loop.client = Anthropic(**(connection or {}))
        else:
            loop.client = OptimiserDesk(Path(folder).resolve(), loop).client()
        finish(loop, home, Optimisation)
    return Optimisation(home)


def _proposal(given: Proposal | dict[str, Any] | None) -> Proposal | None:
    if not isinstance(given, dict):
        return given
    try:
        return Proposal(**given)
    except ValidationError as error:
        raise InputError(f"propose: {explain(error)}") from None


def recorded(name: str) -> Optimisation:
    """An optimisation by its id, or of a spec: the latest of the record, else the latest here."""
    known = [run for run in runs.runs() if run.info.kind == "optimisation"]
    found = [run for run in known if name in (run.id, run.info.spec)]
    if not found:
        there = ", ".join(run.id for run in known) or "none yet"
        raise InputError(f"optimise: {name} has no recorded optimisation; there are: {there}")
    published = [run for run in found if run.folder.parent == runs.RUNS]
    return Optimisation((published or found)[-1].folder)


def _begun(
    engine: Engine,
    provider: str,
    run_id: str | None,
    settings: dict[str, Any],
    model: str,
    effort: str | None,
) -> Path:
    """The folder of a new run."""
    name = run_id or runs.next_id(engine.spec.id, "o")
    # run.json comes last: a folder without it is no run yet
    chosen = _settings(engine, settings).model_dump_json(indent=1) + "\n"
    write_atomic(runs.LOCAL_RUNS / name / SETTINGS, chosen)
    return new_run(engine.spec, provider, name, model=model, effort=effort, kind="optimisation")


def _same_settings(run: Optimisation, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if (then := getattr(run.settings, name, None)) != value:
            raise InputError(f"{name}: run {run.id} began with {then}; keep it, or begin afresh")


def _settings(engine: Engine, given: dict[str, Any]) -> Settings:
    start = {
        "start_run": EngineManifest.read(engine.folder).run,
        "start_tree": tree_hash(engine.folder),
    }
    try:
        return Settings(**{"workloads": workloads_of(engine.spec)} | given | start)
    except ValidationError as error:
        raise InputError(f"settings: {explain(error)}") from None


def _loop(
    engine: Engine,
    home: Path,
    budget: Budget,
    judge: Judge | None,
    bench: Bench | None,
    say: Callable[[str], None],
) -> Search:
    spec, judge = engine.spec, judge or real_judge(engine.spec)
    more = {
        "phases": (),
        "tools": OptimiserTools(**vars(tools_of(spec, home, judge, say)), diffs=home / "diffs"),
        "settings": Optimisation(home).settings,
        "bench": bench or RealBench(spec),
        "home": home,
        "source": engine.folder,
    }
    return loop_of(home, judge, budget, say, Search, **more)


def _one_proposal(loop: Search, proposal: Proposal | None) -> Optimisation:
    """Judge an agent's folder as it stands; without a proposal, measure the start alone.

    Beside the folder, `next` holds the tree that the next attempt begins with.
    """
    theirs, run = loop.source, Optimisation(loop.home)
    if loop.waits and proposal is None:
        raise InputError(f"optimise {theirs}: say what was changed (--propose)")
    rebuild(loop.transcript.lines, loop.tools.engine)
    done, author = len(loop.rows()), None
    if proposal is not None:
        author = OneProposal(loop.tools.engine, theirs, loop.run_id, proposal)
        loop.client = client(author)
    try:
        while not loop.waits or (author and not author.asked and len(loop.rows()) == done):
            if not loop.step():
                run.info.status = "passed"
                break
    except (Stopped, BudgetSpent) as end:
        run.info.status, run.info.reason = "stopped", str(end)
    run.info.tree = loop.transcript.lines[-1].tree
    runs.save(loop.home, run.info)
    if author and len(loop.rows()) == done:
        raise InputError(f"optimise {theirs}: not judged: {loop.transcript.lines[-1].blocks[-1]}")
    mirror(loop.tools.engine, theirs.parent / "next")
    return Optimisation(loop.home)

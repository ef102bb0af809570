"""The `metainfer-lab` command: one short function a verb, each a call that a cell could make.

Exit 0 for yes, 1 for a failed verdict, 2 for bad input (one line on stderr says what to do).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import metainfer_lab as lab

from .errors import InputError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="From a constraint spec to a verified inference engine.",
)
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
ForSpec = Annotated[str | None, typer.Option("--spec", help="which, where it serves several")]
SpecName = Annotated[str, typer.Argument(help="a shipped spec's id, or a YAML file")]
EngineName = Annotated[str, typer.Argument(help="a spec's id, or an engine's folder")]


def say(value: Any, as_json: bool) -> None:
    """Print an object for a person, or as its own JSON."""
    print(value.model_dump_json(indent=1) if as_json else value, flush=True)


def print_table(rows: Any, as_json: bool) -> None:
    """Print a DataFrame as a table, or as a list of JSON objects."""
    print(rows.to_json(orient="records", indent=1) if as_json else rows.to_string(index=False))


def opened_engine(name: str, spec: str | None) -> lab.Engine:
    """The engine of a spec or folder, under the spec asked for."""
    return lab.Engine.open(name, spec=lab.Spec.load(spec) if spec else None)


def finish(passed: bool) -> None:
    """Leave with the verdict's exit code."""
    raise typer.Exit(0 if passed else 1)


@app.command()
def plan(source: SpecName, hardware: str | None = None, as_json: AsJson = False) -> None:
    """What a spec (or any config.json, with --hardware) comes to: resolved, or refused by field."""
    say(lab.plan(source, hardware=hardware), as_json)


@app.command()
def doctor(source: str, spec: str | None = None, as_json: AsJson = False) -> None:
    """Which tensors of a folder or hub id are known, unknown or missing, before a download."""
    diagnosis = lab.doctor(source, spec)
    say(diagnosis, as_json)
    finish(diagnosis.passed)


@app.command()
def generate(
    spec: SpecName,
    provider: Annotated[str, typer.Option(help="replay, file or anthropic")] = "replay",
    folder: Annotated[
        Path | None, typer.Option(help="where a file provider's author answers")
    ] = None,
    reviewer: Annotated[
        str | None, typer.Option(help="folder of another author (file); api or none (anthropic)")
    ] = None,
    phases: Annotated[str | None, typer.Option(help="comma-separated; all where left out")] = None,
    run_id: Annotated[
        str | None, typer.Option(help="the run to replay, go on with or begin")
    ] = None,
    fresh: Annotated[bool, typer.Option(help="a new run, even where one could go on")] = False,
    model: str | None = None,
    effort: str | None = None,
    budget_usd: Annotated[float | None, typer.Option(help="most that the API may cost")] = None,
    tokens: Annotated[int | None, typer.Option(help="most tokens, cached input counted")] = None,
    wall_s: Annotated[float | None, typer.Option(help="most seconds of authors and tools")] = None,
    turns: Annotated[int | None, typer.Option(help="most replies")] = None,
    attempts: Annotated[int | None, typer.Option(help="most submissions of a phase")] = None,
    rejections: Annotated[int | None, typer.Option(help="reviews that may send one back")] = None,
    explain: Annotated[
        bool, typer.Option(help="only say which skills go where, in tokens")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Have an engine written; without a key, the recorded run is replayed with real gates."""
    if explain:
        from .agent import explain as explained

        print_table(explained(lab.Spec.load(spec)), as_json)
        return
    limits = {"budget_usd": budget_usd, "tokens": tokens, "wall_s": wall_s, "turns": turns}
    limits |= {"attempts": attempts, "rejections": rejections, "model": model, "effort": effort}
    given = {name: value for name, value in limits.items() if value is not None}
    run = lab.generate(
        spec,
        provider=provider,
        folder=folder,
        reviewer=reviewer,
        phases=phases.split(",") if phases else None,
        run_id=run_id,
        fresh=fresh,
        **given,
        **({"on_event": lambda text: None} if as_json else {}),
    )
    say(run, as_json)
    finish(run.summary().passed)


@app.command()
def workspace(spec: SpecName, folder: Path) -> None:
    """Lay out a blank folder for a coding agent of one's own: spec, skills, `verify`."""
    print(lab.workspace(spec, folder))


@app.command()
def adopt(
    folder: Path,
    verdict: Annotated[Path | None, typer.Option(help="of this tree, given on its GPU")] = None,
    as_json: AsJson = False,
) -> None:
    """Verify what an agent left in a workspace and record it as a run of provider `external`."""
    run = lab.adopt(folder, verdict=verdict)
    say(run, as_json)
    finish(run.summary().passed)


@app.command()
def verify(
    engine: EngineName,
    gates: Annotated[str | None, typer.Option(help="comma-separated; all where left out")] = None,
    spec: ForSpec = None,
    jobs: Annotated[int, typer.Option(help="gates asked at once")] = 1,
    as_json: AsJson = False,
) -> None:
    """Ask the gates whether an engine is right."""
    show = None if as_json else (lambda verdict: print(verdict, flush=True))
    chosen = gates.split(",") if gates else None
    wanted = lab.Spec.load(spec) if spec else None
    verdict = lab.verify(engine, spec=wanted, gates=chosen, on_gate=show, jobs=jobs)
    say(verdict, as_json)
    finish(verdict.passed)


@app.command()
def audit(
    family: Annotated[
        str | None, typer.Option(help="mutants and fakes of one family; all where left out")
    ] = None,
    names: Annotated[str | None, typer.Option(help="comma-separated mutants and fakes")] = None,
    gates: Annotated[str | None, typer.Option(help="comma-separated; all where left out")] = None,
    fresh: Annotated[bool, typer.Option(help="take nothing over from an interrupted one")] = False,
    record: Annotated[bool, typer.Option(help="publish it as the last whole audit")] = False,
    as_json: AsJson = False,
) -> None:
    """Judge the gates: every mutant and fake must die, every right engine must pass."""
    matrix = lab.audit(
        family,
        names=names.split(",") if names else None,
        gates=gates.split(",") if gates else None,
        on_kill=None if as_json else (lambda judged: print(judged, flush=True)),
        fresh=fresh,
    )
    say(matrix, as_json)
    if record:
        matrix.record()
    finish(matrix.passed)


@app.command()
def optimise(
    engine: Annotated[str, typer.Argument(help="a spec, an engine's folder; a run to replay")],
    provider: str = "replay",
    folder: Annotated[
        Path | None, typer.Option(help="where a file provider's author answers")
    ] = None,
    propose: Annotated[
        str | None, typer.Option(help="external: what was changed in ENGINE, and why")
    ] = None,
    ratio: Annotated[float, typer.Option(help="external: the decode rate predicted")] = 1.0,
    rows: Annotated[
        str | None, typer.Option(help="replay: rows whose gates run for real; all keeps")
    ] = None,
    attempts: int | None = None,
    threshold: Annotated[float | None, typer.Option(help="gain that a keep must exceed")] = None,
    patience: int | None = None,
    blocks: Annotated[int | None, typer.Option(help="most blocks of one comparison")] = None,
    wall_s: float | None = None,
    budget_usd: float | None = None,
    fresh: Annotated[bool, typer.Option(help="a new run, even where one could go on")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a right engine faster: one change, gates, paired measurement, keep or discard."""
    given = {"attempts": attempts, "threshold": threshold, "patience": patience, "blocks": blocks}
    quiet = {"on_event": lambda text: None} if as_json else {}
    change = {"hypothesis": propose, "predicted_ratio": ratio} if propose else None
    run = lab.optimise(
        engine,
        provider,
        folder=folder,
        propose=change,
        rows=None if rows is None else [row for row in rows.split(",") if row],
        wall_s=wall_s,
        budget_usd=budget_usd,
        fresh=fresh,
        **quiet,
        **{name: value for name, value in given.items() if value is not None},
    )
    say(run, as_json)
    finish(run.succeeded)


@app.command()
def chat(
    engine: EngineName,
    prompt: str,
    max_new_tokens: int = 128,
    spec: ForSpec = None,
    as_json: AsJson = False,
) -> None:
    """Ask a model a question; the answer streams."""
    with opened_engine(engine, spec) as opened:
        sink = {"on_text": lambda text: None} if as_json else {}
        answer = opened.chat(prompt, max_new_tokens=max_new_tokens, **sink)
    print(answer.model_dump_json(indent=1) if as_json else "", flush=True)


@app.command()
def bench(
    engine: EngineName,
    beside: Annotated[str, typer.Option(help="comma-separated rivals")] = "transformers",
    spec: ForSpec = None,
    batches: Annotated[str | None, typer.Option(help="numbers of streams: 1,8,32")] = None,
    verdict: Annotated[Path | None, typer.Option(help="what `verify --json` printed")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure an engine and its rivals in turn, on this machine, in one run."""
    rivals = [name for name in beside.split(",") if name]
    judged = _verdict(verdict)
    if batches:
        from .bench import sweep

        try:
            points = [int(n) for n in batches.split(",")]
        except ValueError:
            raise InputError(f"--batches {batches}: write whole numbers, as 1,8,32") from None
        rows = sweep(opened_engine(engine, spec), points, beside=rivals, verdict=judged)
    else:
        with opened_engine(engine, spec) as opened:
            rows = lab.bench(opened, beside=rivals, verdict=judged)
    if as_json:
        print(rows.to_json(orient="records", indent=1))
        return
    columns = ["engine", "batch", "metric", "p20", "p50", "p80", "unit", "floor", "n"]
    print(rows[columns].to_string(index=False))
    print(f"kept in {rows.attrs['saved']}")


def _verdict(path: Path | None) -> Any:
    from .gates import Verdict

    try:
        return Verdict.model_validate_json(path.read_text()) if path else None
    except (OSError, ValueError):
        raise InputError(
            f"--verdict {path}: not what `verify --json` printed, or no file"
        ) from None


@app.command()
def record(
    run: Annotated[
        str, typer.Argument(help="a finished run of data/local/runs, or the CSV of a measurement")
    ],
    engine: Annotated[bool, typer.Option(help="its last tree becomes the spec's engine")] = False,
) -> None:
    """Publish a local run, or rows with their verdict, into the record: the one way in."""
    print(lab.record(run, engine=engine))


@app.command()
def figures(
    names: Annotated[list[str] | None, typer.Argument(help="all of them where left out")] = None,
    check: Annotated[bool, typer.Option(help="hold the published files to the record")] = False,
) -> None:
    """Draw the published figures from the record, or say where they differ from it."""
    if check:
        problems = lab.figures.check(names or [])
        print("\n".join(problems) or "the published figures are what the record draws")
        finish(not problems)
    for path in lab.figures.publish(names or []):
        print(path.relative_to(path.parent.parent))


@app.command()
def notebooks(
    names: Annotated[
        list[str] | None, typer.Argument(help="00, 00_start_here …; all of them")
    ] = None,
    machine: str = "cpu",
    parameter: Annotated[
        list[str] | None, typer.Option("-p", help="NAME=VALUE (a Python literal) for the notebooks")
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="time limit of each notebook")] = 600.0,
    publish: Annotated[bool, typer.Option(help="replace the committed notebooks")] = False,
    as_json: AsJson = False,
) -> None:
    """Run notebooks headless, each in a process of its own, and say truthfully how they ended."""
    from .notebooks import run_notebooks

    given = dict(_pair(text) for text in parameter or [])
    outcomes = run_notebooks(
        names or [], machine, timeout_s=timeout_s, publish=publish, quiet=as_json, **given
    )
    if as_json:
        print(json.dumps([outcome.model_dump(mode="json") for outcome in outcomes], indent=1))
    finish(all(outcome.passed for outcome in outcomes))


def _pair(text: str) -> tuple[str, str]:
    """('phases', "['model']") of "phases=['model']"; the notebook's declaration gives the type."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"-p {text}: write NAME=VALUE")
    return name, value


def main() -> None:
    """Run the command line; every ending has its exit code, bad input has one line."""
    try:
        app()
    except InputError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None

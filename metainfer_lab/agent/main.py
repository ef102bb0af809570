"""`python -m metainfer_lab.agent.main generate SPEC`: the verbs of this room alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from metainfer_lab.agent.generation import generate
from metainfer_lab.agent.run import record
from metainfer_lab.errors import InputError

app = typer.Typer(add_completion=False)


@app.command("generate")
def generate_command(
    spec: str,
    provider: str = "replay",
    folder: Annotated[
        Path | None, typer.Option(help="where the author of a file run answers")
    ] = None,
    run_id: str | None = None,
    fresh: bool = False,
    attempts: int = 8,
    turns: int = 300,
) -> None:
    """Have an engine written for SPEC, or go on with its unfinished run."""
    run = generate(
        spec,
        provider,  # type: ignore[arg-type]
        folder=folder,
        run_id=run_id,
        fresh=fresh,
        attempts=attempts,
        turns=turns,
    )
    raise SystemExit(0 if run.info.status == "passed" else 1)


@app.command("record")
def record_command(run_id: str, engine: bool = False) -> None:
    """Publish a local run into the record; with --engine, its last tree as the spec's engine."""
    print(record(run_id, engine=engine))


def main() -> None:
    """Run the command; a person's mistake is one line and exit code 2."""
    try:
        app()
    except InputError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()

"""Runs side by side, how many of a spec's passed, and what every spec asks to be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from metainfer_lab.agent.phases import explain
from metainfer_lab.agent.run import RUNS, Run, Summary, runs
from metainfer_lab.skills import reachable
from metainfer_lab.spec import Spec, shipped

if TYPE_CHECKING:
    import pandas as pd

ADDED = ["turns", "attempts", "failed_verdicts", "rejections", "lines_of_code", "seconds"]
SPENT = ["input_tokens", "output_tokens", "cost_usd"]  # null where no API said them


def table(chosen: Sequence[Run] | None = None) -> pd.DataFrame:
    """One row a run: attempts, verdicts, tokens, cost, lines, time, whether it passed."""
    import pandas as pd

    rows = [run.summary().model_dump() for run in (runs() if chosen is None else chosen)]
    return pd.DataFrame(rows, columns=list(Summary.model_fields))


def by_spec(chosen: Sequence[Run] | None = None) -> pd.DataFrame:
    """One row a spec and provider: how many of its generations passed, what one took.

    Medians are of the runs that passed; null where none did, or where no API said a number.
    """
    import pandas as pd

    made = [run for run in (runs() if chosen is None else chosen) if run.info.kind == "generation"]
    facts, rows = table(made), []
    for (spec, provider), of_spec in facts.groupby(["spec", "provider"], sort=False):
        right = of_spec[of_spec["status"] == "passed"]
        medians = right[ADDED + SPENT].apply(pd.to_numeric).median()
        share = f"{len(right)} of {len(of_spec)}"
        rows.append([spec, provider, len(right), len(of_spec), share, *medians])
    return pd.DataFrame(
        rows, columns=["spec", "provider", "passed", "runs", "k_of_n", *ADDED, *SPENT]
    )


def overview() -> pd.DataFrame:
    """One row a shipped spec: skills that reach it, phases, the fewest and the most tokens of
    skills that a role is shown in one of them, and how many of its recorded generations passed."""
    import pandas as pd

    made = by_spec([run for run in runs() if run.folder.parent == RUNS])
    written = made[made["provider"] != "external"].groupby("spec")["k_of_n"].agg(", ".join)
    rows = []
    for name in shipped():
        spec = Spec.load(name)
        told = explain(spec)
        bounds = told.groupby("role")["tokens"].agg(["min", "max"]).loc[["implementer", "reviewer"]]
        phases = told["phase"].nunique()
        rows.append([name, len(reachable(spec)), phases, *bounds.to_numpy().flatten()])
    shown = ["implementer_least", "implementer_most", "reviewer_least", "reviewer_most"]
    table = pd.DataFrame(rows, columns=["spec", "skills", "phases", *shown])
    return table.assign(k_of_n=table["spec"].map(written))

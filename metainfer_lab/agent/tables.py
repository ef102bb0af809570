"""Runs side by side: one row a run, and how many of a spec's runs passed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from metainfer_lab.agent.run import Run, Summary, runs

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

"""Published claims, one by one, beside what this record has to say of them.

A claim names its case (model, machine, precision, degree, streams). Our row of the very case judges
it; a row of another case stands beside it and is *not comparable*, with what differs; no row at all
is *not tested*. Nothing is judged by eye.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from metainfer_lab import paths
from metainfer_lab.bench import results

if TYPE_CHECKING:
    import pandas as pd

FILE = paths.RESULTS / "claims.yaml"
AGREE = 0.05  # a number within this share of the claimed one reproduces it
PREFIXES = ("model", "precision")  # qwen3.6-35b-a3b in nvfp4 is also its -nvfp4 checkpoint's mix
Verdict = Literal["reproduced", "exceeded", "not reproduced", "not comparable", "not tested"]


class Record(BaseModel):
    """Fields as the file states them; unknown ones are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Claim(Record):
    """What somebody published. kind says how it is judged; value in `unit`.

    case: columns of the result schema that our row must share; over: the engine whose rate the
    claimed ratio divides by, told by how its name begins; lines: lines of the code compared with;
    modules: the same of its modules on the path of one engine of ours alone, a stricter count.
    """

    id: str
    claim: str
    source: str
    conditions: str
    kind: Literal["rate", "ratio", "less_code", "knowledge_only"]
    value: float | None = None
    unit: str
    case: dict[str, str | int | None] = {}
    over: str | None = None
    lines: int | None = None
    lines_of: str | None = None
    modules: dict[str, int] = {}


class Judged(Record):
    """A claim and our answer to it."""

    id: str
    claim: str
    source: str
    published: str
    conditions: str
    ours: str
    verdict: Verdict
    why: str


def load(path: Path = FILE) -> list[Claim]:
    """The claims, in the order of the file."""
    return [Claim(**entry) for entry in yaml.safe_load(path.read_text())]


def judge(
    claims: list[Claim], rows: pd.DataFrame, engines: dict[str, int], generated: list[str]
) -> list[Judged]:
    """Every claim beside our rows (measured ones, or what our engines' own logs report).

    engines: lines of code of each engine of ours; generated: runs in which an author saw skills
    alone and whose engine passed its gates.
    """
    ours = rows[rows["engine"].isin(engines)]
    by_kind: dict[str, Callable[[Claim], tuple[str, Verdict, str]]] = {
        "less_code": lambda claim: _less_code(claim, engines),
        "knowledge_only": lambda claim: _knowledge_only(generated),
        "rate": lambda claim: _rate(claim, ours),
        "ratio": lambda claim: _ratio(claim, ours, rows),
    }
    return [_judged(claim, *by_kind[claim.kind](claim)) for claim in claims]


def _judged(claim: Claim, ours: str, verdict: Verdict, why: str) -> Judged:
    published = "stated" if claim.value is None else f"{claim.value:g} {claim.unit}"
    shared = claim.model_dump(include={"id", "claim", "source", "conditions"})
    return Judged(**shared, published=published, ours=ours, verdict=verdict, why=why)


def _less_code(claim: Claim, engines: dict[str, int]) -> tuple[str, Verdict, str]:
    """Our largest engine against the code compared with."""
    name, lines = max(engines.items(), key=lambda item: item[1])
    less = 100 * (1 - lines / claim.lines)
    why = f"{name}, the largest engine here, has {lines:,} lines; {claim.lines_of} {claim.lines:,}"
    for ours, theirs in claim.modules.items():
        share = 100 * (1 - engines[ours] / theirs)
        why += f"; {ours} against its modules on the same path ({theirs:,}): {share:.0f} %"
    verdict: Verdict = "reproduced" if less >= claim.value else "not reproduced"
    return f"{less:.1f} %", verdict, why


def _knowledge_only(generated: list[str]) -> tuple[str, Verdict, str]:
    if not generated:
        return "", "not tested", "no recorded run"
    specs = {run.rsplit("-r", 1)[0] for run in generated}
    why = (
        f"{', '.join(generated)}: every gate of their phases passed, the blank-sheet check too; "
        "smaller models and a CPU, no reviewer, the author confined by instruction, not by the "
        "operating system"
    )
    return f"{len(generated)} run(s) of {len(specs)} spec(s)", "reproduced", why


def _rate(claim: Claim, ours: pd.DataFrame) -> tuple[str, Verdict, str]:
    row = _nearest(claim, ours)
    if row is None:
        return "", "not tested", _no_row(claim)
    differs = [*_differences(claim, row)]
    value = f"{row['p50']:,.1f} {row['unit']} ({row['engine']}, {row['origin']})"
    if differs:
        return value, "not comparable", "; ".join(differs)
    return value, _compared(row["p50"] / claim.value), "the same case"


def _ratio(claim: Claim, ours: pd.DataFrame, rows: pd.DataFrame) -> tuple[str, Verdict, str]:
    """Ours over a rival that ran beside it, and else ours over the claim's own numbers."""
    row = _nearest(claim, ours)
    if row is None:
        return "", "not tested", _no_row(claim)
    differs = [*_differences(claim, row)]
    theirs = rows[rows["engine"].str.startswith(claim.over) & (rows["metric"] == row["metric"])]
    beside = theirs[(theirs["raw"] == row["raw"]) & (theirs["batch"] == row["batch"])]
    if len(beside):
        ratio = _ratio_of(row, beside.iloc[0])
        value = f"{ratio:.2f} x {claim.over} beside it ({row['engine']} on {row['gpu']})"
        if not differs:
            return value, _compared(ratio / claim.value), "the same case"
        return value, "not comparable", "; ".join(differs)
    same = theirs[[not [*_differences(claim, other)] for _, other in theirs.iterrows()]]
    value = f"{row['p50']:,.1f} {row['unit']} on {row['gpu']} ({row['origin']})"
    if len(same):
        value += f"; {_ratio_of(row, same.iloc[0]):.2f} x the {claim.over} of the claim"
    return value, "not comparable", "; ".join([*differs, f"{claim.over} did not run beside it"])


def _no_row(claim: Claim) -> str:
    case = claim.case
    return f"no row of ours: {case['metric']} of {case['model']} at {case['batch']} stream(s)"


def _ratio_of(ours: pd.Series, theirs: pd.Series) -> float:
    """How many times better: more tokens a second, or fewer milliseconds."""
    ratio = ours["p50"] / theirs["p50"]
    return ratio if ours["metric"] in results.RATES else 1 / ratio


def _compared(share: float) -> Verdict:
    if share < 1 - AGREE:
        return "not reproduced"
    return "exceeded" if share > 1 + AGREE else "reproduced"


def _nearest(claim: Claim, ours: pd.DataFrame) -> pd.Series | None:
    """Our row of the claim's model, metric and streams that differs in the fewest columns."""
    ours = ours[ours["model"].str.startswith(str(claim.case["model"]))]
    for column in ("metric", "batch"):
        ours = ours[ours[column] == claim.case[column]]
    if ours.empty:
        return None
    distance = [len([*_differences(claim, row)]) for _, row in ours.iterrows()]
    return ours.iloc[min(range(len(ours)), key=distance.__getitem__)]


def _differences(claim: Claim, row: pd.Series) -> Iterator[str]:
    """What of the claim's case a row does not share; conditions are looked up in `conditions`."""
    stated = results.unpair(row["conditions"])
    for column, wanted in claim.case.items():
        found = row[column] if column in row.index else stated.get(column, "off")
        words = str(found).split(" (")[0]
        if words != str(wanted) and not (column in PREFIXES and words.startswith(str(wanted))):
            yield f"{column} {words} here, {wanted} there"

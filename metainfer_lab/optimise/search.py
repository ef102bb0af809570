"""Where the search goes next: pure functions of the ledger's rows, nothing else is remembered.

Kept rows form a tree. Work goes on from the fastest kept row until `patience` attempts from it in
a row came to nothing; then a second line begins at the fastest of the others, which is an earlier
ancestor. The search has plateaued when as many trees as `lines` are exhausted since the best
improved, or no other is left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from metainfer_lab.optimise.records import Settings

BASELINE, FINAL = "0", "final"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Next:
    """The row whose tree the next attempt begins with, or why there is none."""

    parent: str | None = None
    stop: str | None = None


def attempts(rows: Iterable[Row]) -> list[Row]:
    """Rows of proposals: neither the baseline nor the final measurement."""
    return [row for row in rows if row["id"] not in (BASELINE, FINAL)]


def kept(rows: Iterable[Row]) -> list[Row]:
    """The baseline and every kept attempt, in order."""
    return [row for row in rows if row["status"] == "keep" and row["id"] != FINAL]


def speeds(rows: Iterable[Row]) -> dict[str, float]:
    """Speed of every kept tree over the baseline: the product of ratios along its line.

    A change kept for its fewer lines counts as one of equal speed.
    """
    found: dict[str, float] = {}
    for row in kept(rows):
        known = row["id"] != BASELINE and row["ratio_lo"] > 1
        found[row["id"]] = found.get(row["parent"], 1.0) * (row["ratio"] if known else 1.0)
    return found


def ranked(rows: Iterable[Row]) -> list[str]:
    """Kept rows, the fastest first; of equals the latest first."""
    found = speeds(rows)
    return sorted(reversed(found), key=lambda name: -found[name])


def best(rows: Iterable[Row]) -> str:
    """The fastest kept row."""
    return ranked(rows)[0]


def misses(rows: Iterable[Row], parent: str) -> int:
    """Attempts from one tree since something was last kept from it."""
    count = 0
    for row in attempts(rows):
        if row["parent"] == parent:
            count = 0 if row["status"] == "keep" else count + 1
    return count


def next_attempt(rows: Collection[Row], settings: Settings, share: float | None = None) -> Next:
    """What to try next. share: of the roofline that the best tree reaches, where it is known."""
    if share is not None and share >= settings.floor_share:
        return Next(stop=f"floor: {share:.0%} of the roofline is reached")
    if len(attempts(rows)) >= settings.attempts:
        return Next(stop=f"attempts: all {settings.attempts} are used")
    names = ranked(rows)
    exhausted = [name for name in names if misses(rows, name) >= settings.patience]
    fresh = [name for name in names if name not in exhausted]
    since = _since_best(rows)
    if not fresh or since >= settings.lines * settings.patience:
        return Next(stop=f"plateau: {since} attempts since the best tree, that of row {names[0]}")
    return Next(parent=fresh[0])


def _since_best(rows: Collection[Row]) -> int:
    ids = [row["id"] for row in rows]
    return len(attempts(list(rows)[ids.index(best(rows)) + 1 :]))


def worth_another_look(
    rows: Iterable[Row], touched: Mapping[str, Collection[str]], assumed: Mapping[str, list[str]]
) -> list[str]:
    """Discarded ideas whose ground has changed: a later keep altered a file that they rest on.

    touched: files that each row's diff changes; assumed: files that each proposal named.
    """
    rows, again = attempts(rows), []
    for place, row in enumerate(rows):
        if row["status"] != "discard":
            continue
        ground = set(assumed.get(row["id"]) or touched.get(row["id"], ()))
        later = [other for other in rows[place + 1 :] if other["status"] == "keep"]
        if any(ground & set(touched.get(other["id"], ())) for other in later):
            again.append(row["id"])
    return again

"""How an engine came about: a generation's turns, an optimisation's tries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metainfer_lab.figures.style import BLACK, GREEN, SKY, VERMILION, footnote, style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VERDICTS = {True: ("gates passed", GREEN, "o"), False: ("a gate failed", VERMILION, "X")}
KEPT = {True: ("kept", GREEN, "o"), False: ("thrown away", VERMILION, "s")}


def timeline(turns: pd.DataFrame) -> Figure:
    """How a generation went: each phase a bar over its turns, each verdict a mark on it.

    turns: one row a turn, as `Run.timeline()` gives it; of it the columns turn, phase, passed
    (None where no gate ran) and submission (whether the verdict could end the phase).
    """
    from matplotlib.figure import Figure

    phases = list(dict.fromkeys(turns["phase"]))
    with style():
        figure = Figure(figsize=(6.75, 0.9 + 0.3 * len(phases)))
        axes = figure.subplots()
        for place, phase in enumerate(phases):
            _phase(axes, place, turns[turns["phase"] == phase])
        axes.set_yticks(range(len(phases)), phases)
        axes.set_ylim(len(phases) - 0.4, -0.6)
        axes.set_xlabel("turn (a reply of the author and what came of it)")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
        _verdict_legend(axes)
    return figure


def _phase(axes: Axes, place: int, turns: pd.DataFrame) -> None:
    first, last = turns["turn"].min(), turns["turn"].max()
    axes.barh(place, last - first + 0.8, left=first - 0.4, height=0.5, color=SKY, alpha=0.35)
    for passed, (_, colour, marker) in VERDICTS.items():
        at = turns.loc[[value is passed for value in turns["passed"]], "turn"]
        axes.scatter(at, [place] * len(at), color=colour, marker=marker, s=22, zorder=3)


def _verdict_legend(axes: Axes) -> None:
    from matplotlib.lines import Line2D

    marks = [
        Line2D([], [], linestyle="", color=colour, marker=marker, label=label)
        for label, colour, marker in VERDICTS.values()
    ]
    axes.legend(handles=marks, loc="lower left", ncols=2)


def running_best(tries: pd.DataFrame) -> Figure:
    """What was tried, what it was worth, and the best so far, as the speed over the first version.

    tries: `ledger.best_so_far`: id, status, speed, lo, hi (NaN where no interval was measured) and
    best. Every try is drawn, what was thrown away hollow.
    """
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(6.75, 3.0))
        axes = figure.subplots()
        axes.step(range(len(tries)), tries["best"], where="post", color=BLACK, label="best so far")
        for kept, (label, colour, marker) in KEPT.items():
            _tries(axes, tries, tries["status"].eq("keep") == kept, label, colour, marker)
        names = [name if len(name) <= 12 else f"{name[:11]}…" for name in tries["id"]]
        axes.set_xticks(range(len(tries)), names, rotation=45, ha="right")
        axes.set_ylabel("speed, first version = 1")
        axes.set_xlabel("try, in the order of the ledger")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
        workloads = "; ".join(sorted(tries["workload"].unique()))
        footnote(figure, f"{workloads}. Bars: the measured interval of the ratio to the parent.")
    return figure


def _tries(
    axes: Axes, tries: pd.DataFrame, chosen: pd.Series, label: str, colour: str, marker: str
) -> None:
    places = [place for place, taken in enumerate(chosen) if taken]
    rows = tries[chosen.to_numpy()]
    spread = [rows["speed"] - rows["lo"], rows["hi"] - rows["speed"]]
    face = colour if marker == "o" else "none"
    axes.errorbar(places, rows["speed"], yerr=spread, fmt="none", ecolor=colour, capsize=2)
    axes.scatter(places, rows["speed"], marker=marker, c=face, edgecolors=colour, label=label)

"""What physics and machine code allow: floors over the batch, issue time against memory time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metainfer_lab.errors import InputError
from metainfer_lab.figures.style import BLUE, MARKERS, SERIES, VERMILION, footnote, style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def floors_by_batch(rows: pd.DataFrame) -> Figure:
    """Floors of several specs over the batch: time per token on the left, throughput on the right.

    rows: columns spec, batch, context (one for all), tpot_ms, tok_s, as `Plan.floors` gives them.
    No engine is drawn: these are bounds, calculated at the planning rates of each machine.
    """
    from matplotlib.figure import Figure

    contexts = sorted(rows["context"].unique())
    if len(contexts) != 1:
        raise InputError(f"figures: floors at one context to a figure, not {contexts}")
    with style():
        figure = Figure(figsize=(6.75, 3.2))
        for axes, column, label in zip(
            figure.subplots(1, 2),
            ("tpot_ms", "tok_s"),
            ("least ms per token of a stream", "most tok/s of all streams"),
            strict=True,
        ):
            _floor_lines(axes, rows, column)
            axes.set_xlabel("streams (batch)")
            axes.set_ylabel(label)
        names = rows["spec"].nunique()
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
        text = f"{names} specs, {contexts[0]:,} cached tokens a stream; calculated, nothing ran."
        footnote(figure, text)
    return figure


def _floor_lines(axes: Axes, rows: pd.DataFrame, column: str) -> None:
    from matplotlib.ticker import LogLocator

    for place, (spec, group) in enumerate(rows.groupby("spec", sort=False)):
        colour, marker = SERIES[place % len(SERIES)], MARKERS[place % len(MARKERS)]
        axes.plot(group["batch"], group[column], color=colour, marker=marker, label=spec)
    batches = sorted(rows["batch"].unique())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter("{x:,g}")
    axes.set_xticks(batches, [str(batch) for batch in batches])


def issue_against_memory(rows: pd.DataFrame) -> Figure:
    """Time to issue a kernel's instructions over the time to move its bytes, a panel per target.

    rows: columns kernel, arch, issue_us, memory_us (a step's launches together), as
    `inspection.summary` gives them; kernels without an issue time are left out. Both are least
    times, counted and calculated: nothing ran.
    """
    from matplotlib.figure import Figure

    known = rows[rows["issue_us"].notna()]
    targets, kernels = list(known["arch"].unique()), list(known["kernel"].unique())
    if not targets:
        raise InputError("figures: no kernel among the rows has an issue time")
    with style():
        figure = Figure(figsize=(6.75, 1.1 + 0.27 * len(kernels)))
        panels = figure.subplots(1, len(targets), sharey=True, squeeze=False)[0]
        for axes, target in zip(panels, targets, strict=True):
            _issue_bars(axes, known[known["arch"] == target].set_index("kernel").loc[kernels])
            axes.set_title(target)
            axes.set_xlabel("µs a step")
        panels[0].set_yticks(range(len(kernels)), kernels)
        panels[0].invert_yaxis()
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
        text = "Least times, from machine code and bytes; nothing ran. Red: issue sets the pace."
        footnote(figure, text)
    return figure


def _issue_bars(axes: Axes, rows: pd.DataFrame) -> None:
    places = range(len(rows))
    colours = [VERMILION if row.issue_us > row.memory_us else BLUE for row in rows.itertuples()]
    axes.barh(places, rows["memory_us"], height=0.75, color="#cfcfcf", label="memory time")
    axes.barh(places, rows["issue_us"], height=0.32, color=colours, label="issue time")
    for place, row in zip(places, rows.itertuples(), strict=True):
        reach = max(row.issue_us, row.memory_us)
        share = f"{row.issue_us / row.memory_us:.0%}"
        axes.annotate(
            share, (reach, place), (2, 0), textcoords="offset points", va="center", fontsize=6
        )
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")

"""How fast: engines beside each other, beside the floor, and what a step's time is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metainfer_lab.bench import results
from metainfer_lab.errors import InputError
from metainfer_lab.figures.style import (
    BLACK,
    GREY,
    SERIES,
    caption,
    footnote,
    look,
    style,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
BEYOND = "beyond the floor"


def single_stream(rows: pd.DataFrame) -> Figure:
    """Decode rate of each engine at one operating point: median, 20th to 80th percentile, floor.

    rows: the result schema; rates in tok/s. The rate of the matrix products alone is a line, like
    the floor: neither is an engine. InputError when the rows are of several operating points.
    """
    from matplotlib.figure import Figure

    rates = rows[rows["metric"] == "decode_tok_s"]
    _one_point(rates)
    engines = rates[rates["engine"] != "products"].reset_index(drop=True)
    with style():
        figure = Figure()
        axes = figure.subplots()
        for place, (_, row) in enumerate(engines.iterrows()):
            _bar(axes, place, row)
        axes.set_xticks(range(len(engines)), [_label(row) for _, row in engines.iterrows()])
        axes.set_ylabel("decode, tok/s")
        _products_line(axes, rates)
        axes.set_xlim(-0.6, len(engines) - 0.1)
        axes.margins(y=0.12)
        axes.set_ylim(bottom=0)
        footnote(figure, caption(engines))
    return figure


def _one_point(rows: pd.DataFrame) -> None:
    if rows.empty:
        raise InputError("figures: no decode_tok_s rows to draw")
    points = rows[["model", *results.POINT]].drop_duplicates()
    if len(points) > 1:
        listed = "; ".join(str(tuple(point)) for point in points.itertuples(index=False))
        raise InputError(f"figures: one operating point to a figure, not {len(points)}: {listed}")


def _bar(axes: Axes, place: int, row: pd.Series) -> None:
    colour, hatch, _ = look(row["engine"])
    hollow = {"color": "none", "edgecolor": colour, "linestyle": "--"}
    filled = {"color": colour, "edgecolor": "white", "hatch": hatch}
    axes.bar(place, row["p50"], width=0.6, **(hollow if row["origin"] == "reported" else filled))
    if row[["p20", "p80"]].notna().all():
        spread = [[row["p50"] - row["p20"]], [row["p80"] - row["p50"]]]
        axes.errorbar(place, row["p50"], yerr=spread, color=BLACK, capsize=2.5, linewidth=0.8)
    _text(axes, place + 0.02, row["p50"], f"{row['p50']:.1f}", BLACK)
    if row["floor"] == row["floor"]:  # NaN where a reported number has none
        kind = results.unpair(row["conditions"]).get("floor", "nominal")
        axes.hlines(row["floor"], place - 0.4, place + 0.4, color=BLACK, linestyle="--")
        _text(axes, place - 0.4, row["floor"], f"floor {row['floor']:.0f} ({kind})", BLACK)


def _label(row: pd.Series) -> str:
    origin = "" if row["origin"] == "live" else f" ({row['origin']})"
    return f"{row['engine']}\n{row['precision']}{origin}"


def _products_line(axes: Axes, rates: pd.DataFrame) -> None:
    for _, row in rates[rates["engine"] == "products"].iterrows():
        axes.axhline(row["p50"], color=GREY, linestyle=":")
        text = f"matrix products alone {row['p50']:.1f}"
        axes.annotate(
            text,
            (0.995, row["p50"]),
            (0, 2),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            ha="right",
            fontsize=7,
            color="#505050",
        )


def _text(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    axes.annotate(text, (x, y), (1, 2), textcoords="offset points", fontsize=7, color=colour)


def throughput(rows: pd.DataFrame) -> Figure:
    """Throughput of all streams over the speed that one stream sees, a line for each engine.

    rows: `decode_tok_s` (drawn over) and `tpot_ms` (1000 / it is a stream's speed) at several
    batches. The floor is a line through the batches that carry one; reported points are hollow.
    """
    from matplotlib.figure import Figure

    points = _by_stream(rows)
    with style():
        figure = Figure(figsize=(6.75, 3.2))
        axes = figure.subplots()
        for (engine, origin), group in points.groupby(["engine", "origin"], sort=False):
            _engine_line(axes, engine, origin, group.sort_values("batch"))
        _floor_line(axes, points.dropna(subset="floor"))
        axes.set_xlabel("decode of one stream, tok/s")
        axes.set_ylabel("decode of all streams, tok/s")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4)
        footnote(figure, caption(rows))
    return figure


def _by_stream(rows: pd.DataFrame) -> pd.DataFrame:
    """One row an engine and batch: tok_s of all streams, stream_tok_s of one, floor."""
    if rows[["model", "gpu", "prompt_len"]].drop_duplicates().shape[0] != 1:
        raise InputError("figures: throughput of one model, machine and prompt length to a figure")
    key = ["engine", "origin", "precision", "batch"]
    rates = rows[rows["metric"] == "decode_tok_s"].rename(columns={"p50": "tok_s"})
    times = rows[rows["metric"] == "tpot_ms"].assign(stream_tok_s=lambda r: 1e3 / r["p50"])
    points = rates[[*key, "tok_s", "p20", "p80", "floor"]].merge(times[[*key, "stream_tok_s"]])
    if points.empty:
        raise InputError("figures: no engine has both decode_tok_s and tpot_ms rows")
    return points


def _engine_line(axes: Axes, engine: str, origin: str, points: pd.DataFrame) -> None:
    colour, _, marker = look(engine)
    reported = origin == "reported"
    axes.plot(
        points["stream_tok_s"],
        points["tok_s"],
        color=colour,
        marker=marker,
        linestyle="--" if reported else "-",
        markerfacecolor="none" if reported else colour,
        label=f"{engine} ({origin})",
    )
    for point in points.itertuples():
        axes.annotate(
            str(point.batch),
            (point.stream_tok_s, point.tok_s),
            (3, 3),
            textcoords="offset points",
            fontsize=6,
            color=colour,
        )


def _floor_line(axes: Axes, points: pd.DataFrame) -> None:
    floor = points.drop_duplicates("batch").sort_values("batch")
    if len(floor):
        axes.plot(
            floor["floor"] / floor["batch"], floor["floor"], color=BLACK, ls=":", label="floor"
        )


def step_shares(shares: pd.DataFrame) -> Figure:
    """What a measured decode step is made of: least time of each part, and what is left over.

    shares: columns engine, part, ms, in order; the part `beyond the floor` is drawn hollow. One
    bar an engine; the parts of a bar are the measured step.
    """
    from matplotlib.figure import Figure

    engines = list(dict.fromkeys(shares["engine"]))
    with style():
        figure = Figure(figsize=(6.75, 1.3 + 0.45 * len(engines)))
        axes = figure.subplots()
        for place, engine in enumerate(engines):
            _stack(axes, place, shares[shares["engine"] == engine])
        axes.set_yticks(range(len(engines)), engines)
        axes.invert_yaxis()
        axes.set_xlabel("ms a decode step")
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
        handles, labels = axes.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        figure.legend(unique.values(), unique.keys(), loc="outside upper center", ncols=4)
    return figure


def _stack(axes: Axes, place: int, parts: pd.DataFrame) -> None:
    left, whole = 0.0, parts["ms"].sum()
    for colour, part in zip(SERIES, parts.itertuples(), strict=False):
        beyond = part.part == BEYOND
        fill = (
            {"color": "white", "edgecolor": GREY, "hatch": "///"} if beyond else {"color": colour}
        )
        axes.barh(place, part.ms, left=left, height=0.6, label=part.part, **fill)
        if part.ms > 0.04 * whole:
            text = f"{part.ms / whole:.0%}"
            middle = left + part.ms / 2
            ground = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"}
            axes.text(middle, place, text, ha="center", va="center", fontsize=6, bbox=ground)
        left += part.ms

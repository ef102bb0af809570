"""The only place that draws: a table in, a `Figure` out. No file is read, no pyplot state kept.

One style sheet, a fixed colour and hatch for each engine (Okabe and Ito's palette, told apart by
the colour-blind and in grey print), the floor in every performance figure, conditions beneath it.
"""

from __future__ import annotations

import hashlib
import io
import json
import textwrap
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from metainfer_lab import paths
from metainfer_lab.bench import results
from metainfer_lab.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE, GREY = "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#7F7F7F"
# Engine -> (colour, hatch). What is not named here is an engine of ours.
LOOKS: dict[str, tuple[str, str]] = {
    "transformers": (ORANGE, "///"),
    "products": (GREY, ""),
    "vllm": (VERMILION, "\\\\\\"),
    "sglang": (PURPLE, "..."),
    "tensorrt-llm": (GREEN, "xxx"),
    "llama.cpp": (YELLOW, "---"),
}
OURS = (BLUE, "")
VERDICTS = {True: ("gates passed", GREEN, "o"), False: ("a gate failed", VERMILION, "X")}


def style() -> AbstractContextManager:
    """The style sheet, for the time of a `with`."""
    import matplotlib.style

    return matplotlib.style.context(Path(__file__).with_name("paper.mplstyle"))


def look(engine: str) -> tuple[str, str]:
    """Colour and hatch of an engine, by its name up to the version: `vllm-0.25.1` is `vllm`."""
    return LOOKS.get(engine, LOOKS.get(engine.split("-")[0], OURS))


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
        figure.supxlabel(caption(engines), fontsize=6, color="#404040")
    return figure


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


def caption(rows: pd.DataFrame) -> str:
    """Conditions that the rows of one figure share, and where the numbers come from."""
    first = rows.iloc[0]
    point = f"{first['batch']} stream(s), {first['prompt_len']} in, {first['output_len']} out"
    runs = f"median and 20th to 80th percentile of {first['n']} runs"
    weights = " seeded weights," if (rows["weights"] == "seeded").any() else ""
    origins = ", ".join(sorted(rows["origin"].unique()))
    tried = {results.unpair(text).get("decoding") for text in rows["conditions"]} - {None}
    text = (
        f"{first['model']} on {first['gpu']}; {point};{weights} {'; '.join(sorted(tried))}; "
        f"{runs}; {origins}."
    )
    return textwrap.fill(text, 130)


def save(figure: Figure, table: pd.DataFrame, name: str, folder: Path | None = None) -> list[Path]:
    """Write NAME.pdf, .png, .csv (what was plotted) and .json (where it comes from).

    The bytes depend on the figure and the libraries' versions alone: no time, no commit.
    """
    folder = folder or paths.FIGURES
    blobs: dict[str, bytes] = {"csv": table.to_csv(index=False, lineterminator="\n").encode()}
    with style():
        for kind, metadata in _METADATA.items():
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, metadata=metadata)
            blobs[kind] = buffer.getvalue()
    blobs["json"] = (json.dumps(provenance(blobs, table), indent=1) + "\n").encode()
    written = [folder / f"{name}.{kind}" for kind in blobs]
    for path, blob in zip(written, blobs.values(), strict=True):
        paths.write_atomic(path, blob)
    return written


_METADATA: dict[str, dict[str, None]] = {
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}


def provenance(blobs: dict[str, bytes], table: pd.DataFrame) -> dict[str, object]:
    """Hashes of table, images and of this file, library versions, and the caption's facts."""
    import matplotlib
    import pandas

    return {
        "sha256": {kind: hashlib.sha256(blob).hexdigest() for kind, blob in sorted(blobs.items())},
        "drawn_by": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "versions": {"matplotlib": matplotlib.__version__, "pandas": pandas.__version__},
        "columns": list(table.columns),
    }


def _one_point(rows: pd.DataFrame) -> None:
    if rows.empty:
        raise InputError("figures: no decode_tok_s rows to draw")
    points = rows[["model", *results.POINT]].drop_duplicates()
    if len(points) > 1:
        listed = "; ".join(str(tuple(point)) for point in points.itertuples(index=False))
        raise InputError(f"figures: one operating point to a figure, not {len(points)}: {listed}")


def _bar(axes: Axes, place: int, row: pd.Series) -> None:
    colour, hatch = look(row["engine"])
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


SERIES = (BLACK, BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE, GREY)
MARKERS = "osD^vPX*"


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
        figure.supxlabel(text, fontsize=6, color="#404040")
    return figure


def _floor_lines(axes: Axes, rows: pd.DataFrame, column: str) -> None:
    for place, (spec, group) in enumerate(rows.groupby("spec", sort=False)):
        colour, marker = SERIES[place % len(SERIES)], MARKERS[place % len(MARKERS)]
        axes.plot(group["batch"], group[column], color=colour, marker=marker, label=spec)
    batches = sorted(rows["batch"].unique())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,g}")
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
        figure.supxlabel(text, fontsize=6, color="#404040")
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

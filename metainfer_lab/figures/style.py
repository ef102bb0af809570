"""One style sheet, a fixed look for each engine, conditions beneath each figure.

Okabe and Ito's palette, told apart by the colour-blind; hatches and markers for grey print.
"""

from __future__ import annotations

import textwrap
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from metainfer_lab.bench import results

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

STYLE = Path(__file__).parent.with_name("paper.mplstyle")
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE, GREY = "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#7F7F7F"
# Engine -> (colour, hatch, marker). What is not named here is an engine of ours.
LOOKS: dict[str, tuple[str, str, str]] = {
    "transformers": (ORANGE, "///", "s"),
    "products": (GREY, "", "_"),
    "vllm": (VERMILION, "\\\\\\", "^"),
    "sglang": (PURPLE, "...", "v"),
    "tensorrt-llm": (GREEN, "xxx", "D"),
    "llama.cpp": (YELLOW, "---", "P"),
}
OURS = (BLUE, "", "o")
# For series that are no engines, in their order.
SERIES = (BLACK, BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE, GREY)
MARKERS = "osD^vPX*"


def style() -> AbstractContextManager:
    """The style sheet, for the time of a `with`."""
    import matplotlib.style

    return matplotlib.style.context(STYLE)


def look(engine: str) -> tuple[str, str, str]:
    """Colour, hatch and marker of an engine, by its name up to the version (`vllm-0.25.1`)."""
    return LOOKS.get(engine, LOOKS.get(engine.split("-")[0], OURS))


def footnote(figure: Figure, text: str) -> None:
    """Small print beneath a figure: conditions, and what was measured or not."""
    figure.supxlabel(textwrap.fill(text, 130), fontsize=6, color="#404040")


def caption(rows: pd.DataFrame) -> str:
    """Conditions that the rows of one figure share, and where the numbers come from."""
    first = rows.iloc[0]
    streams, asked, answered, runs = (
        "/".join(map(str, sorted(rows[column].dropna().unique())))
        for column in ("batch", "prompt_len", "output_len", "n")
    )
    lengths = f"{asked} in, {answered} out"
    facts = [f"{first['model']} on {first['gpu']}", f"{streams} stream(s), {lengths}"]
    facts += ["seeded weights"] if (rows["weights"] == "seeded").any() else []
    facts += sorted({_decoding(text) for text in rows["conditions"]} - {None})
    facts += [f"median and 20th to 80th percentile of {runs} runs"] if runs else []
    return "; ".join([*facts, ", ".join(sorted(rows["origin"].unique()))]) + "."


def _decoding(conditions: str) -> str | None:
    return results.unpair(conditions).get("decoding")

"""The kill matrix of an audit: which gate kills which wrong engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metainfer_lab.figures.style import BLUE, GREY, VERMILION, footnote, style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def kill_matrix(table: pd.DataFrame) -> Figure:
    """A column for each wrong engine, a row for each gate; what one gate alone kills stands out.

    table: `Audit.table()`: name, kind (what it is a mutant or fake of) and a column of truth values
    for each gate. Columns of a kind are put in the order of the first gate that kills them.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    gates = [column for column in table.columns if column not in ("name", "kind")]
    table = table.sort_values(["kind", *gates], ascending=[True, *(False for _ in gates)])
    kills = table[gates].to_numpy(dtype=int, copy=True)
    kills[kills.sum(axis=1) == 1] *= 2
    with style():
        # placed by hand: so much ink shows the fraction of a pixel by which a layout may be off
        figure = Figure(figsize=(6.75, 0.9 + 0.21 * len(gates)))
        figure.set_layout_engine("none")
        axes = figure.add_axes((0.13, 0.1, 0.86, 0.82))
        colours = ListedColormap(["#FFFFFF", BLUE, VERMILION])
        axes.pcolormesh(kills.T, cmap=colours, vmin=0, vmax=2, edgecolors="white", linewidth=0.3)
        labels = [f"{gate} ({n})" for gate, n in zip(gates, (kills > 0).sum(axis=0), strict=True)]
        axes.set_yticks([i + 0.5 for i in range(len(gates))], labels)
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.set_xticks([])
        start = 0
        for kind, count in table["kind"].value_counts(sort=False).items():
            axes.axvline(start, color=GREY, linewidth=1)
            axes.text(start + count / 2, -0.25, f"{count} {kind}", ha="center", fontsize=7)
            start += count
        dead = int((kills.max(axis=1) > 0).sum())
        said = f"{dead} of {len(kills)} wrong engines are dead."
        footnote(figure, f"{said} Blue: killed by this gate; vermilion: by this gate alone.")
    return figure

"""HTML that JupyterLab and GitHub both show: plain tables, folds, code; no style sheets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

# A dash, or a number that may carry its unit.
NUMBER = re.compile(r"[-+–]?([\d.,]+(e[-+]?\d+)?( ?[^\s\d]{1,10})?|inf)?")


class Markup(str):
    """HTML that is already safe."""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; cells are escaped unless they are `Markup`."""
    rows = [*rows]
    sides = [_side(row[column] for row in rows) for column in range(len(head))]
    titles = "".join(f"<th{s}>{escape(title)}</th>" for s, title in zip(sides, head, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{s}>{_cell(v)}</td>' for s, v in zip(sides, row, strict=True))}</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def frame_html(frame: pd.DataFrame) -> str:
    """A DataFrame as pandas draws it, with words to the left."""
    sides = [_side(frame.index.get_level_values(level)) for level in range(frame.index.nlevels)]
    sides += [_side(column) for _, column in frame.items()]

    def aligned(row: re.Match[str]) -> str:
        cells = len(re.findall("<t[dh]", row.group()))
        side = iter(sides[-cells:] if cells <= len(sides) else [""] * cells)
        return re.sub("<t[dh](?=[ >])", lambda cell: cell.group() + next(side), row.group())

    return re.sub("<tr.*?</tr>", aligned, frame._repr_html_(), flags=re.DOTALL)


def fold(summary: str, body: str, is_open: bool = False) -> str:
    """A part that unfolds; `body` is HTML, `summary` text."""
    state = " open" if is_open else ""
    return f"<details{state}><summary>{escape(summary)}</summary>{body}</details>"


def code(text: str, language: str | None = None) -> str:
    """Text as it stands, in colours where the language is known (python, diff, yaml, ...)."""
    box = "max-height: 30em; overflow: auto"
    if language is None:
        return f'<pre style="{box}">{escape(text)}</pre>'
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name

    # Pygments' dark-on-light colours need their own light ground to be readable in a dark theme,
    # and JupyterLab gives a <pre> a ground and a colour of the theme.
    ground = "background: transparent; color: #000"
    formatter = HtmlFormatter(noclasses=True, cssstyles=f"padding: 4px; {box}", prestyles=ground)
    return highlight(text, get_lexer_by_name(language), formatter)


def _cell(value: object) -> str:
    if isinstance(value, Markup):
        return value
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else escape(str(value))


def _side(values: Iterable[object]) -> str:
    """The style of a column's cells: only numbers belong to the right, where JupyterLab has all."""
    said = {str(value) for value in values} - {"None", "nan", "<NA>"}
    return "" if all(NUMBER.fullmatch(text) for text in said) else ' style="text-align: left"'

"""How long an engine is, so that neither a stripped comment nor a joined line makes it shorter."""

from __future__ import annotations

import ast
from pathlib import Path

from metainfer_lab.paths import tree_files

COMMENTS = {".cu": "//", ".cuh": "//", ".cpp": "//", ".h": "//"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(folder: Path) -> int:
    """Lines of an engine's code: Python as `ast.unparse` writes it without docstrings, other
    sources without blank lines and comment lines."""
    return sum(_python(p) if p.suffix == ".py" else _other(p) for p in tree_files(folder))


def _python(path: Path) -> int:
    text = path.read_text()
    try:
        tree = ast.parse(text)
    except SyntaxError:  # such a tree does not start, let alone is it kept
        return len(text.splitlines())
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return len(ast.unparse(tree).splitlines())


def _other(path: Path) -> int:
    mark = COMMENTS.get(path.suffix)
    if mark is None:
        return 0
    lines = (line.strip() for line in path.read_text().splitlines())
    return sum(bool(line) and not line.startswith(mark) for line in lines)

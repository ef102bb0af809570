"""Notebook files: their parameters cell, headings, outputs, and what must not be committed."""

from __future__ import annotations

import ast
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from pydantic import TypeAdapter, ValidationError

from metainfer_lab import paths
from metainfer_lab.errors import InputError

PARAMETERS, INJECTED = "parameters", "injected-parameters"
# Names that an annotation in a parameters cell may use.
TYPES: dict[str, Any] = {t.__name__: t for t in (str, int, float, bool, list, dict)}


def read_notebook(path: Path) -> NotebookNode:
    """A version 4 notebook; InputError when the file is none."""
    try:
        return nbformat.read(path, as_version=4)
    except (OSError, ValueError, nbformat.ValidationError) as error:
        raise InputError(f"{path.name}: no readable notebook ({error})") from None


def save_notebook(notebook: NotebookNode, path: Path) -> None:
    """Write a notebook in one step."""
    paths.write_atomic(path, nbformat.writes(notebook) + "\n")


def tagged(notebook: NotebookNode, tag: str) -> list[NotebookNode]:
    """Cells that carry a tag."""
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]


def declared(path: Path) -> dict[str, tuple[Any, Any]]:
    """Parameters of a notebook: name -> (type, default), from lines `name: type = default`."""
    cells = tagged(read_notebook(path), PARAMETERS)
    if len(cells) != 1:
        raise InputError(f"{path.name}: {len(cells)} cells are tagged `parameters`; one is needed")
    lines = [node for node in ast.parse(cells[0].source).body if isinstance(node, ast.AnnAssign)]
    return {
        node.target.id: (_type(node.annotation), ast.literal_eval(node.value)) for node in lines
    }


def _type(annotation: ast.expr) -> Any:
    return eval(
        compile(ast.Expression(annotation), "<parameters>", "eval"), {"__builtins__": TYPES}
    )


def check_parameters(files: list[Path], given: dict[str, object]) -> dict[Path, dict[str, object]]:
    """For each notebook the given parameters that it declares, in the declared type.

    InputError for a name that none of them declares, or a value of another type.
    """
    known = {path: declared(path) for path in files}
    everything = sorted({name for names in known.values() for name in names})
    unknown = [name for name in given if name not in everything and name != "machine"]
    if unknown:
        raise InputError(
            f"parameter {unknown[0]!r}: declared by no notebook; use {', '.join(everything)}"
        )
    return {
        path: {n: _typed(n, names[n][0], value) for n, value in given.items() if n in names}
        for path, names in known.items()
    }


def _typed(name: str, kind: Any, value: object) -> object:
    """A value in the declared type; text is read as a Python literal unless text is asked for."""
    found = value
    if isinstance(value, str) and kind is not str:
        with contextlib.suppress(ValueError, SyntaxError):
            found = ast.literal_eval(value)
    try:
        found = TypeAdapter(kind).validate_python(found)
    except ValidationError:
        wanted = getattr(kind, "__name__", str(kind))
        raise InputError(f"parameter {name!r}: {value!r} is no {wanted}") from None
    if isinstance(found, dict) and not all(isinstance(key, str) for key in found):
        raise InputError(
            f"parameter {name!r}: keys of a dict must be text; a notebook gets no other"
        )
    return found


def place_of(cell: NotebookNode, notebook: NotebookNode) -> tuple[int, str] | None:
    """Index of a cell, told by its id, and the heading above it; None for one that papermill put
    in."""
    title = ""
    for index, other in enumerate(notebook.cells):
        if other.get("id") == cell.get("id"):
            return index, title
        if other.cell_type == "markdown" and other.source.startswith("#"):
            title = other.source.splitlines()[0].lstrip("# ")
    return None


def error_outputs(notebook: NotebookNode) -> list[str]:
    """Names and texts of errors among the outputs."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [f"{o.ename}: {o.evalue}" for o in outputs if o.output_type == "error"]


def last_line(notebook: NotebookNode) -> str:
    """The last line that the notebook prints: by house rule the one that sums it up."""
    for cell in reversed(notebook.cells):
        for output in reversed(cell.get("outputs", [])):
            text = output.get("text") or output.get("data", {}).get("text/plain", "")
            if text.strip():
                return text.strip().splitlines()[-1]
    return ""


def scrub(notebook: NotebookNode) -> NotebookNode:
    """Take out what belongs to one run on one machine: papermill's stamps, timings, paths; what was
    printed in pieces becomes one output, since a page shows each output on lines of its own."""
    for metadata in (notebook.metadata, *(cell.metadata for cell in notebook.cells)):
        for key in ("papermill", "widgets", "execution"):
            metadata.pop(key, None)
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = _joined(cell.outputs)
        for output in cell.get("outputs", []):
            output.pop("metadata", None) if output.output_type == "error" else None
            _relative(output)
    return notebook


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Outputs with neighbours of one stream put together."""
    kept: list[NotebookNode] = []
    for output in outputs:
        if kept and output.get("name") and output.get("name") == kept[-1].get("name"):
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def _relative(node: Any) -> None:
    """Replace this machine's folders in every text of an output."""
    for key, value in node.items():
        if isinstance(value, dict):
            _relative(value)
        elif isinstance(value, str):
            node[key] = value.replace(f"{paths.ROOT}/", "").replace(str(paths.ROOT), ".")


def without_injection(notebook: NotebookNode) -> NotebookNode:
    """The notebook as its author wrote it: no injected cell, execution counts 1 to n."""
    injected = tagged(notebook, INJECTED)
    notebook.cells = [cell for cell in notebook.cells if cell not in injected]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for count, cell in enumerate(code, start=1):
        cell.execution_count = count
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = count
    return notebook


def write_kernel(folder: Path) -> None:
    """A Jupyter kernel's folder that starts this very interpreter."""
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": command, "display_name": "Python 3 (ipykernel)", "language": "python"}
    paths.write_atomic(folder / "kernel.json", json.dumps(spec))

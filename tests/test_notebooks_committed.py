"""What every committed notebook holds to: executed, scrubbed, short, with one parameters cell."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest

from metainfer_lab import notebook_files, paths

ALL = sorted(paths.NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
ABSOLUTE = re.compile(r"/(home|root|work|tmp|Users|opt|srv|mnt)/|[A-Z]:\\\\|site-packages")
LINES, MEGABYTE = 16, 1 << 20


@pytest.fixture(params=ALL, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def notebook(path: Path) -> nbformat.NotebookNode:
    return notebook_files.read_notebook(path)


def code_cells(notebook: nbformat.NotebookNode) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert {path.stem for path in ALL} >= {"00_start_here", "03_agent_generation"}


def test_valid_small_and_with_ids(path, notebook):
    nbformat.validate(notebook)
    ids = [cell["id"] for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert path.stat().st_size < MEGABYTE


def test_executed_in_order_without_error(notebook):
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not notebook_files.error_outputs(notebook)
    streams = [o for c in cells for o in c.outputs if o.output_type == "stream"]
    assert not [o.text for o in streams if o.name == "stderr"]


def test_nothing_of_the_machine_that_ran_it(path, notebook):
    found = ABSOLUTE.search(json.dumps(notebook))
    assert not found, json.dumps(notebook)[max(0, found.start() - 80) : found.end() + 80]
    for metadata in (notebook.metadata, *(cell.metadata for cell in notebook.cells)):
        assert not {"papermill", "widgets", "execution"} & set(metadata)
    assert notebook.metadata.kernelspec.name == "python3"


def test_one_parameters_cell_names_the_machine(path, notebook):
    assert len(notebook_files.tagged(notebook, "parameters")) == 1
    assert not notebook_files.tagged(notebook, "injected-parameters")
    kind, default = notebook_files.declared(path)["machine"]
    assert kind is str and default == "cpu"


def test_house_rules(path, notebook):
    cells = code_cells(notebook)
    assert notebook.cells[0].cell_type == "markdown"
    assert notebook.cells[0].source.startswith(f"# {path.stem[:2]} ")
    assert "**Claim" in notebook.cells[0].source
    assert all(0 < len(cell.source.splitlines()) <= LINES for cell in cells)
    assert "version" in cells[0].source
    assert notebook.cells[-1].cell_type == "code" and notebook_files.last_line(notebook)


def test_start_here_is_ten_cells_and_links_to_what_exists():
    notebook = notebook_files.read_notebook(paths.NOTEBOOKS / "00_start_here.ipynb")
    assert len(code_cells(notebook)) <= 10
    text = "\n".join(cell.source for cell in notebook.cells)
    links = set(re.findall(r"\]\(([\w.]+\.ipynb)\)", text))
    others = {path.name for path in ALL} - {"00_start_here.ipynb"}
    assert links == others, "00 links to each other notebook that exists, and to no other"
    for number in range(1, 11):
        assert f"{number:02}_" in text, f"00 names notebook {number:02}"

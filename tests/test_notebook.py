"""The notebook runs, and shows what it should."""

import warnings
from pathlib import Path

import nbformat
import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "notebook" / "first_run.ipynb"


@pytest.fixture(scope="module")
def executed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the packages that run notebooks, not of what is run
        from nbclient import NotebookClient

        notebook = nbformat.read(NOTEBOOK, as_version=4)
        NotebookClient(notebook, timeout=120, coalesce_streams=True).execute()
    return notebook


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def test_the_notebook_runs_and_shows_tables_pictures_and_one_bar_per_run(executed):
    shown = outputs(executed)
    assert all(output.output_type != "error" for output in shown)
    assert not [output.text for output in shown if output.get("name") == "stderr"]
    tables = [output.data["text/html"] for output in shown if "text/html" in output.get("data", {})]
    assert [sum(word in table for table in tables) for word in ("Federation of", "Run of IFCA", "Run of CFL")] == [
        1,
        1,
        1,
    ]
    assert sum("image/png" in output.get("data", {}) for output in shown) == 2
    printed = "".join(output.get("text", "") for output in shown)
    assert "IFCA |" in printed and "round 60/60" in printed and "round 59/60" not in printed
    assert "├─ round" in printed


def test_the_notebook_is_stored_with_what_it_shows(executed):
    def kinds(notebook):
        return [
            (output.output_type, output.get("name"), sorted(output.get("data", {}))) for output in outputs(notebook)
        ]

    assert kinds(nbformat.read(NOTEBOOK, as_version=4)) == kinds(executed)
    assert NOTEBOOK.stat().st_size < 200_000


def test_the_first_cells_are_the_readmes_first_lines():
    source = "\n".join(cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells)
    readme = (NOTEBOOK.parents[2] / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert [line for line in readme.splitlines() if line not in source] == []

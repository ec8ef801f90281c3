"""The notebooks in examples/ run from top to bottom, and hold what they return."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    kept = _outputs(notebook)
    client = NotebookClient(notebook, timeout=250, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    assert _outputs(notebook) == kept, "run it again, and save it"
    assert [path.name for path in tmp_path.iterdir()] == [], "it leaves nothing in the reader's folder"


def _outputs(notebook):
    """Return what each cell shows, by kind; progress is gone in the end, and leaves an empty line."""
    cells = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    return [
        [(one.output_type, *sorted(one.get("data", ()))) for one in outputs if one.get("data") != {"text/plain": ""}]
        for outputs in cells
    ]


def test_a_notebook_is_in_the_guide_and_has_a_title():
    guide = (Path(__file__).parent.parent / "docs" / "python.md").read_text()
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        assert f"(../examples/{path.name})" in guide
        assert nbformat.read(path, as_version=4).cells[0].source.startswith("# ")

"""The notebook that explores a run finds its fault, and what is stored with it is what it prints today."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "examples" / "explore_run.ipynb"


def printed(notebook: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))


@pytest.mark.ci
def test_it_finds_the_leap_of_the_learning_rate(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, 4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    text = printed(notebook)
    assert text.startswith("step 200  update-ratio-jump")
    assert "Set the learning rate back to 0.002" in text
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))


def test_what_is_stored_with_it_is_of_one_run_from_top_to_bottom():
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert "step 200  update-ratio-jump" in printed(notebook)
    assert NOTEBOOK.stat().st_size < 200_000

"""The example notebook runs in a real kernel, and what it exports is what it measured."""

import math
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import forewarn

NOTEBOOK = Path(__file__).parent.parent / "examples" / "module_monitor.ipynb"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which the notebook was run, with the notebook as it was then."""
    pytest.importorskip("h5py")
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("example")
    notebook = nbformat.read(NOTEBOOK, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONWARNINGS", "error:::__main__")
        NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    nbformat.write(notebook, folder / "run.ipynb")
    return folder


def printed(path):
    """What the cells of a notebook have printed."""
    cells = nbformat.read(path, 4).cells
    return "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", []))


def test_it_learns_and_says_what_it_exported(place):
    loss, steps, num_metrics = re.search(
        r"loss ([\d.]+) after (\d+) steps\n(\d+) metrics", printed(place / "run.ipynb")
    ).groups()
    assert float(loss) < 3.5 < math.log(256)
    assert steps == "60"
    assert int(num_metrics) == len(forewarn.StorageManager.load_hdf5(place / "metrics.h5"))


def test_every_question_is_answered_on_every_monitored_step(place):
    metrics = forewarn.StorageManager.load_hdf5(place / "metrics.h5")
    for name in (
        "loss",
        "activation/mlp/rms",
        "activation/mlp.2/positive",
        "activation/attention.head_3.query/rms",
        "attention_entropy/attention.head_3",
        "gradient/head.weight/norm",
        "parameter_difference/tokens.weight/distance",
        "RCC (W_t-W_0)x_t/mlp.1.weight/l2norm",
    ):
        assert list(metrics[name]) == list(range(0, 60, 5)), name
        assert all(map(math.isfinite, metrics[name].values())), name
    entropy = metrics["attention_entropy/attention.head_0"]
    most = sum(math.log(num_keys) for num_keys in range(1, 33)) / 32  # of a causal head that attends to all alike
    assert all(0 < value <= most for value in entropy.values())
    assert metrics["RCC (W_t-W_0)x_t/head/l2norm"][0] == 0  # before the first update there is nothing to add
    assert not [name for name in metrics if name.startswith("RCC") and "attention" in name]


def test_the_picture_is_drawn_and_shown(place):
    assert (place / "metrics.png").read_bytes().startswith(b"\x89PNG")
    shown = [output for cell in nbformat.read(place / "run.ipynb", 4).cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert not [output for output in shown if output.get("name") == "stderr"]


def test_what_is_stored_with_the_notebook_is_small_and_of_one_run_from_top_to_bottom():
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert "60 steps" in printed(NOTEBOOK)
    assert NOTEBOOK.stat().st_size < 150_000
    assert len(notebook.cells) - len(code) >= 5  # it is told, not only run

"""The notebook-style example runs as a whole, and what it exports is what it measured."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import forewarn

EXAMPLE = Path(__file__).parent.parent / "examples" / "module_monitor.py"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which the example was run."""
    pytest.importorskip("h5py")
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("example")
    command = [sys.executable, "-W", "error", str(EXAMPLE)]
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert ended.returncode == 0, ended.stderr
    (folder / "said.txt").write_text(ended.stdout)
    return folder


def test_it_learns_and_says_what_it_exported(place):
    loss, steps, num_metrics = re.search(
        r"loss ([\d.]+) after (\d+) steps\n(\d+) metrics", (place / "said.txt").read_text()
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


def test_the_picture_is_drawn(place):
    assert (place / "metrics.png").read_bytes().startswith(b"\x89PNG")


def test_it_is_made_of_cells():
    cells = re.findall(r"^# %%", EXAMPLE.read_text(), re.MULTILINE)
    assert len(cells) >= 10

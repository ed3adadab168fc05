"""The dual-task LSTM: what it learns from, what it refuses, what it leaves behind."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import forewarn
from forewarn.lab.data import BURST_TYPES, bursts
from forewarn.lab.dual_task import DualTaskLSTM
from forewarn.lab.snapshots import load_snapshot
from tests.real_runs import dual_task_lstm

ROOT = Path(__file__).parent.parent.parent


def fitted(tmp_path, **settings):
    torch.manual_seed(0)
    data = bursts(200, 24)
    model = DualTaskLSTM()
    return model.fit(*data, epochs=2, result_dir=tmp_path, **settings), data


def test_bursts_are_where_and_what_they_say():
    data = bursts(600, 24, seed=1)
    assert torch.equal(data.sequences, bursts(600, 24, seed=1).sequences)
    assert data.sequences.shape == (600, 24, 1)
    assert torch.bincount(data.types).tolist() == [200] * len(BURST_TYPES)
    for values, start, end in zip(data.sequences[..., 0], data.starts, data.ends, strict=True):
        inside = values[start : end + 1].mean()
        outside = torch.cat([values[:start], values[end + 1 :]]).mean()
        assert 0 <= start < end < 24
        assert inside > 0.5 > outside
    rising = data.types == BURST_TYPES.index("rise")
    change = torch.stack([x[e, 0] - x[s, 0] for x, s, e in zip(*(data.sequences, data.starts, data.ends), strict=True)])
    assert change[rising].mean() == pytest.approx(1.5, abs=0.15)


def test_without_monitoring_it_trains_the_same_and_leaves_nothing_behind(tmp_path, capsys):
    bare, data = fitted(tmp_path / "bare")
    watched, _ = fitted(tmp_path / "watched", monitor_gradients=True)
    assert bare.epochs == watched.epochs, "watching changes no bit"
    assert bare.monitor is None
    assert not (tmp_path / "bare").exists()
    assert (tmp_path / "watched" / "run" / "run.json").exists()
    prediction = watched.predict(data.sequences)
    assert prediction.types.shape == prediction.starts.shape == prediction.ends.shape == (200,)
    assert 0 < float(prediction.starts.mean()) < float(prediction.ends.mean()) < 24


def test_weights_reach_the_loss_with_and_without_the_monitor(tmp_path, capsys):
    weights = {"pointer": 0.3, "type": 2.0}
    bare, _ = fitted(tmp_path / "a", task_weights=weights)
    watched, _ = fitted(tmp_path / "b", task_weights=weights, monitor_gradients=True)
    assert bare.epochs == watched.epochs


def test_numpy_arrays_and_a_type_alone_are_enough(tmp_path, capsys):
    data = bursts(100, 12)
    model = DualTaskLSTM(predict_pointers=False)
    model.fit(data.sequences[..., 0].numpy(), data.types.numpy(), epochs=1, monitor_gradients=True, result_dir=tmp_path)
    assert model.predict(np.zeros((3, 12), np.float32)).starts is None
    assert set(model.epochs[0].held_out) == {"type", "accuracy"}
    assert "task/ratio" not in model.monitor.history


def test_a_collapse_saves_a_snapshot_that_can_be_read(tmp_path):
    model = dual_task_lstm(0, tmp_path / "run", epochs=5, task_weights={"type": 0.001})
    assert "T102" in {alert.code for alert in model.monitor.alerts}
    (path,) = (tmp_path / "snapshots").glob("step-*.pt")
    twin = DualTaskLSTM()
    twin.load_state_dict(load_snapshot(path)["model"])


def test_every_metric_of_the_run_is_documented(tmp_path, capsys):
    fitted(tmp_path, monitor_gradients=True)
    text = (ROOT / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `(task/[a-z_]+)`", text, re.MULTILINE))
    with forewarn.open_run(tmp_path / "run") as run:
        recorded = {name for name in run.names() if name.startswith("task/")}
    assert recorded == documented


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        ((torch.zeros(4, 5), torch.zeros(3), torch.zeros(4), torch.zeros(4)), {}, "4 sequences and y 3 types"),
        ((torch.zeros(4, 5), torch.zeros(4), torch.zeros(4)), {}, "belong together"),
        ((torch.zeros(4, 5), torch.zeros(4)), {}, "predict_pointers=False"),
        ((torch.zeros(4, 5), torch.zeros(4), torch.zeros(2), torch.zeros(2)), {}, "2 starts and ends"),
        ((torch.zeros(4), torch.zeros(4)), {}, "samples, length"),
        ((torch.zeros(4, 5), torch.zeros(4)), {"balance": "gradnorm"}, "monitor_gradients=True"),
    ],
)
def test_wrong_data_is_one_clear_sentence(arguments, settings, words):
    with pytest.raises(ValueError, match=words):
        DualTaskLSTM().fit(*arguments, **settings)

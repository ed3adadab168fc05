"""What a snapshot holds, when it is written, and that writing it never harms the training."""

import json
import math
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import forewarn
from forewarn.store.deletion import delete_run
from forewarn.store.snapshot_folders import FILES, read_json, read_snapshot, snapshots_in
from tests.bitwise import random_states, seed_everything
from tests.snapshots.loops import WRONG, nan_in_sample_5, small, train


def test_a_critical_alert_writes_a_snapshot_of_its_step(tmp_path):
    monitor = train(small(), tmp_path / "run", break_it=nan_in_sample_5)
    (folder,) = snapshots_in(tmp_path / "run")
    assert folder.name == f"step-{WRONG:06d}"
    snapshot = read_snapshot(folder)
    assert snapshot.step == WRONG
    assert snapshot.alert is not None
    assert (snapshot.alert.code, snapshot.alert.severity) == ("L101", forewarn.Severity.CRITICAL)
    assert math.isnan(snapshot.alert.finding.value)
    assert snapshot.files == {
        file.name: file.stat().st_size for file in folder.iterdir() if file.name != "snapshot.json"
    }
    readings = read_json(folder / "readings.json")["metrics"]
    assert readings["train/loss"]["steps"] == list(range(WRONG + 1))
    recorded = monitor.history.series("train/loss").values[:WRONG]
    assert [row[0] for row in readings["train/loss"]["values"]][:WRONG] == pytest.approx(recorded.tolist())
    with forewarn.open_run(tmp_path / "run") as run:
        assert [event.data["step"] for event in run.events() if event.kind == "snapshot"] == [WRONG]


def test_the_batch_is_the_one_of_that_step_as_the_model_got_it(tmp_path):
    train(small(), tmp_path / "run", break_it=nan_in_sample_5, settings={"keep_batches": 3})
    (folder,) = snapshots_in(tmp_path / "run")
    tensors = load_file(folder / "batch.safetensors")
    kept = read_json(folder / "batch.json")["steps"]
    assert [one["step"] for one in kept] == [WRONG - 2, WRONG - 1, WRONG]
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 4, generator=generator) for _ in range(WRONG + 1)]
    batches[WRONG][5, 2] = math.nan
    for one in kept:
        (name,) = one["calls"][0]["arguments"]["tensors"]
        assert torch.equal(tensors[name].nan_to_num(9e9), batches[one["step"]].nan_to_num(9e9))


def test_by_default_nothing_is_kept_and_a_snapshot_has_no_batch_and_no_weights(tmp_path):
    monitor = train(small(), tmp_path / "run", break_it=nan_in_sample_5, settings={"keep_batches": 0})
    assert monitor._loop.kept is None
    (folder,) = snapshots_in(tmp_path / "run")
    assert {file.name for file in folder.iterdir()} == {
        "snapshot.json", "readings.json", "config.json", "environment.json",
    }  # fmt: skip
    assert "keep_batches" in read_snapshot(folder).notes[0]


@pytest.mark.parametrize(("which", "is_finite"), [("before", True), ("after", False)])
def test_weights_are_those_of_before_or_after_the_update(which, is_finite, tmp_path):
    model = small()
    seen = {}

    def break_it(step, inputs, targets):
        seen[step] = model[0].weight.detach().clone()
        nan_in_sample_5(step, inputs, targets)

    train(model, tmp_path / "run", break_it=break_it, settings={"weights": which})
    (folder,) = snapshots_in(tmp_path / "run")
    weights = load_file(folder / "weights.safetensors")
    assert weights.keys() == model.state_dict().keys()
    assert read_snapshot(folder).weights == which
    if is_finite:
        assert torch.equal(weights["0.weight"], seen[WRONG])
    else:
        assert torch.equal(weights["0.weight"].isnan(), model[0].weight.isnan())
        assert weights["0.weight"].isnan().any()


def test_weights_over_the_limit_are_left_out_and_that_is_said(tmp_path):
    train(small(), tmp_path / "run", break_it=nan_in_sample_5, settings={"weights": "after", "most_weight_bytes": 9})
    (folder,) = snapshots_in(tmp_path / "run")
    assert not (folder / "weights.safetensors").exists()
    assert "most_weight_bytes" in read_snapshot(folder).notes[0]


def test_no_more_than_the_allowed_number_are_written_and_none_if_switched_off(tmp_path):
    def often(step, inputs, targets):
        inputs[0] *= 1e8**step  # every level of the loss is new

    train(small(), tmp_path / "most", steps=30, break_it=often, settings={"most": 1})
    assert len(snapshots_in(tmp_path / "most")) == 1
    train(small(), tmp_path / "none", break_it=nan_in_sample_5, settings={"automatic": False})
    assert snapshots_in(tmp_path / "none") == []
    assert not (tmp_path / "none" / "snapshots").exists()


def test_by_hand_it_is_of_the_step_under_way_or_of_the_last_one(tmp_path, watch):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = watch(model, optimizer, run=tmp_path / "run", config={"snapshots": {"keep_batches": 1}})
    for _ in range(3):
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
    assert monitor.snapshot("after").name == "step-000002"
    model(torch.zeros(2, 4))
    path = monitor.snapshot("under way")
    assert path.name == "step-000003"
    assert read_snapshot(path).reason == "under way"
    (tensor,) = load_file(path / "batch.safetensors").values()
    assert not tensor.any()
    assert monitor.snapshot("again").name == "step-000003-2"
    assert [folder.name for folder in snapshots_in(tmp_path / "run")] == ["step-000002", "step-000003", "step-000003-2"]
    with pytest.raises(TypeError, match="reason must be a string"):
        monitor.snapshot(3)
    monitor.close()
    with pytest.raises(RuntimeError, match="closed"):
        monitor.snapshot()


def test_a_folder_that_cannot_be_written_is_one_warning_and_one_alert(tmp_path, watch, caplog):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = watch(model, optimizer, run=tmp_path / "run")
    (tmp_path / "run" / "snapshots").write_text("in the way")
    for step in range(4):
        loss = model(torch.full((2, 4), math.nan if step == 1 else 1.0)).sum()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
    assert caplog.text.count("was not written") == 1
    assert [alert.code for alert in monitor.alerts if alert.code.startswith("X")] == ["X108"]
    assert monitor.snapshot() is None
    (tmp_path / "run" / "snapshots").unlink()
    assert monitor.snapshot() is not None
    monitor.step(1.0)
    assert "X108" not in {alert.code for alert in monitor.firing}


def test_a_full_disk_leaves_nothing_behind(tmp_path, watch, monkeypatch):
    model = small()
    monitor = watch(model, torch.optim.SGD(model.parameters(), 0.1), run=tmp_path / "run")
    monitor.step(1.0)

    def full(path, value, **_):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("forewarn.snapshots.writing._describe", lambda description, path: full(path, description))
    assert monitor.snapshot() is None
    assert not (tmp_path / "run" / "snapshots").exists()


def test_nothing_in_a_snapshot_is_a_pickle(tmp_path):
    train(small(), tmp_path / "run", break_it=nan_in_sample_5, settings={"weights": "before"})
    (folder,) = snapshots_in(tmp_path / "run")
    assert {file.name for file in folder.iterdir()} == set(FILES)
    for file in folder.iterdir():
        if file.suffix == ".json":
            json.loads(file.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        else:
            length = int.from_bytes(file.read_bytes()[:8], "little")
            assert json.loads(file.read_bytes()[8 : 8 + length])


def test_secrets_are_in_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "sesame-in-the-environment")
    monkeypatch.setattr("sys.argv", ["train.py", "--token=sesame-on-the-command-line"])
    model = small()
    config = {"notify": ["json://localhost/sesame-in-the-config"], "snapshots": {"keep_batches": 1}}
    with forewarn.watch(
        model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "run", views=[], config=config
    ) as monitor:
        monitor.step(1.0)
        folder = monitor.snapshot()
    assert b"sesame" not in b"".join(file.read_bytes() for file in folder.iterdir())


@pytest.mark.parametrize("keep", [{}, {"keep_batches": 2, "weights": "before"}], ids=["default", "everything"])
def test_training_is_bit_identical_while_batches_are_kept_and_snapshots_written(keep, watch):
    def trained(is_watched):
        seed_everything(0)
        model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(inplace=True), nn.Linear(8, 2)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        monitor = watch(model, optimizer, every=5, config={"snapshots": keep}) if is_watched else None
        losses = []
        for step in range(30):
            inputs = torch.randn(6, 4)
            if monitor:
                monitor.batch(inputs, torch.zeros(6))
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if monitor:
                monitor.step(loss)
                if step % 10 == 9:
                    assert monitor.snapshot() is not None
            losses.append(loss.item())
        return losses, model.state_dict(), random_states()

    bare, watched = trained(False), trained(True)
    assert bare[0] == watched[0]
    assert all(torch.equal(bare[1][name], watched[1][name]) for name in bare[1])
    assert bare[2] == watched[2]


def test_overwriting_a_run_deletes_its_snapshots_and_nothing_else(tmp_path):
    train(small(), tmp_path / "run", break_it=nan_in_sample_5)
    notes = tmp_path / "run" / "snapshots" / "step-000012" / "notes.txt"
    notes.write_text("mine")
    delete_run(tmp_path / "run")
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_file()] == [notes]
    shutil.rmtree(tmp_path / "run")
    train(small(), tmp_path / "run", break_it=nan_in_sample_5)
    delete_run(tmp_path / "run")
    assert os.listdir(tmp_path / "run") == []


def test_a_resumed_run_keeps_its_snapshots(tmp_path):
    train(small(), tmp_path / "run", break_it=nan_in_sample_5)
    model = small()
    with forewarn.watch(
        model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "run", resume=True, views=[]
    ) as monitor:
        monitor.step(1.0)
        monitor.snapshot()
    assert [folder.name for folder in snapshots_in(tmp_path / "run")] == ["step-000012", "step-000013"]


def test_without_safetensors_keeping_batches_is_refused_at_the_start_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    model = small()
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'forewarn\[snapshots\]'"):
        forewarn.watch(
            model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "run", config={"snapshots": {"keep_batches": 1}}
        )


def test_weights_of_before_need_kept_batches():
    with pytest.raises(ValueError, match="needs keep_batches"):
        forewarn.Snapshots(weights="before")

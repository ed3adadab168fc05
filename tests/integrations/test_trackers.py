"""The views of trackers with the real packages, offline; what was written is read back with their own readers."""

import contextlib
import json
import logging
import re
import struct
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import forewarn
from tests.bitwise import random_states, seed_everything

pytest.importorskip("wandb")
mlflow = pytest.importorskip("mlflow")
trackio = pytest.importorskip("trackio")

import wandb  # noqa: E402
from wandb.proto import wandb_internal_pb2  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

STEPS = 30
SPIKE = 20


@pytest.fixture(scope="module")
def mlflow_store(tmp_path_factory):
    """One database for all tests: to create it takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch, request, mlflow_store):
    """Each tracker keeps its files on this machine, apart from those of other tests."""
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HF_HUB_OFFLINE": "1",
        "MLFLOW_TRACKING_URI": mlflow_store,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    folder = tmp_path / "trackio"
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("trackio") and hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", folder)
    mlflow.set_tracking_uri(mlflow_store)
    if "mlflow" in request.node.name:
        mlflow.set_experiment(tmp_path.name)
    yield
    with contextlib.suppress(Exception):
        wandb.finish()
    mlflow.end_run()
    with contextlib.suppress(RuntimeError):
        trackio.finish()


def train(views, log=lambda step, loss: None, steps=STEPS, run="run", spike=SPIKE, before_end=lambda: None, **given):
    """A user's loop, with a NaN loss at one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = {"hyperparameters": {"dropout": 0.1}}
    with forewarn.watch(model, optimizer, run, views=views, every=10, config=config, **given) as monitor:
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 4)).square().mean() * (float("nan") if step == spike else 1.0)
            loss.backward()
            if step != spike:
                optimizer.step()
            monitor.step(loss)
            time.sleep(0.005)  # as long as the sender needs
            log(step, float(step))
        before_end()
    return monitor


def recorded(monitor, name="train/loss"):
    """Finite readings of a run by step."""
    with forewarn.open_run(monitor.path) as run:
        series = run.series(name)
        return {
            step: value for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True)
            if np.isfinite(value)
        }  # fmt: skip


# Weights & Biases


def all_records(path):
    """The records of one of W&B's offline files: blocks of 32 KiB as in LevelDB's log, each record a protobuf."""
    data, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, part = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if part in (1, 4):
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def records(folder, kind):
    """The records of one kind in finished runs; W&B's own process writes the end of a file after `wandb.finish`."""
    deadline = time.monotonic() + 20
    for path in sorted(Path(folder).rglob("*.wandb")):
        while not any(record.HasField("exit") for record in all_records(path)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield from (getattr(record, kind) for record in all_records(path) if record.HasField(kind))


def history(folder):
    """The rows of a W&B run by W&B's own step."""
    rows = {}
    for row in records(folder, "history"):
        values = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item}
        assert row.step.num not in rows
        rows[row.step.num] = {name: value for name, value in values.items() if not name.startswith("_")}
    return rows


def test_readings_are_in_the_rows_that_the_user_logs(tmp_path):
    run = wandb.init(project="p", dir=Path.cwd(), config={"lr": "mine"})
    monitor = train([forewarn.WandbView()], lambda step, loss: wandb.log({"loss": loss}))
    wandb.finish()
    rows = history(tmp_path)
    assert {step: row["loss"] for step, row in rows.items() if "loss" in row} == {s: float(s) for s in range(STEPS)}
    losses = recorded(monitor)
    told = {row["forewarn/step"]: row for row in rows.values() if "forewarn/train/loss" in row}
    assert len(told) > STEPS / 2
    for step, row in told.items():
        if step != SPIKE:
            assert row["forewarn/train/loss"] == pytest.approx(losses[step], rel=1e-6)
    assert any("forewarn/gradient/histogram/bins" in row for row in rows.values())
    assert all(name == "loss" or name.startswith("forewarn/") for row in rows.values() for name in row)
    metrics = {metric.name or metric.glob_name: metric.step_metric for metric in records(tmp_path, "metric")}
    assert metrics == {"forewarn/step": "", "forewarn/*": "forewarn/step"}
    assert run.config["lr"] == "mine"
    assert run.config["forewarn"]["lr"] == 0.01
    assert run.config["forewarn"]["dropout"] == 0.1
    assert len(list(tmp_path.rglob("*.wandb"))) == 1


@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize("every", [1, 7])
def test_steps_that_the_user_passes_are_kept_and_no_row_is_lost(every, own_rows, tmp_path, capfd):
    def log(step, loss):
        if step % every == 0:
            wandb.log({"loss": loss}, step=step)

    wandb.init(project="p", dir=Path.cwd(), settings={"silent": False})
    monitor = train([forewarn.WandbView(own_rows=own_rows)], log)
    wandb.finish()
    rows = history(tmp_path)
    mine = {step: row["loss"] for step, row in rows.items() if "loss" in row}
    assert mine == {step: float(step) for step in range(0, STEPS, every)}
    if own_rows:
        told = {row["forewarn/step"] for row in rows.values() if "forewarn/step" in row}
        assert len(told) > 0.8 * STEPS
    assert "less than current step" not in capfd.readouterr().err
    assert recorded(monitor)


def test_steps_that_the_user_does_not_pass_are_counted_as_without_forewarn(tmp_path):
    wandb.init(project="p", dir=Path.cwd())
    train([forewarn.WandbView()], lambda step, loss: wandb.log({"loss": loss}) if step % 10 == 9 else None)
    wandb.log({"test": 1.0})
    wandb.finish()
    mine = {step: row.get("loss", row.get("test")) for step, row in history(tmp_path).items()}
    assert mine == {0: 9.0, 1: 19.0, 2: 29.0, 3: 1.0}


def test_a_script_that_logs_nothing_is_told_about_rows_of_its_own(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("forewarn.views.wandb.STEPS_WITHOUT_A_ROW", 20)
    wandb.init(project="p", dir=Path.cwd())
    train([forewarn.WandbView()])
    assert [line for line in caplog.messages if "own_rows=True" in line]
    wandb.finish()
    wandb.init(project="p", dir=tmp_path / "own")
    monitor = train([forewarn.WandbView(own_rows=True)], run="own")
    wandb.finish()
    rows = history(tmp_path / "own")
    assert list(rows) == list(range(STEPS))
    losses = {step: row["forewarn/train/loss"] for step, row in rows.items() if "forewarn/train/loss" in row}
    assert losses == pytest.approx(recorded(monitor), rel=1e-6)


def test_alerts_are_alerts_of_wandb_and_lines_of_its_summary(tmp_path):
    wandb.init(project="p", dir=Path.cwd())
    train([forewarn.WandbView()], steps=90)
    wandb.finish()
    alerts = [(alert.title, alert.level) for alert in records(tmp_path, "alert")]
    assert ("L101 non-finite-loss: The training loss is NaN or infinite", "ERROR") in alerts
    assert ("L101 non-finite-loss: resolved", "INFO") in alerts
    assert len(alerts) == len(set(alerts))
    assert all(len(title) < 64 for title, _ in alerts)
    (first,) = [alert.text for alert in records(tmp_path, "alert") if alert.level == "ERROR"]
    assert "do: Skip the batch at step 20." in first
    summary = {
        "/".join(item.nested_key) or item.key: json.loads(item.value_json)
        for record in records(tmp_path, "summary") for item in record.update
    }  # fmt: skip
    assert summary["forewarn/verdict"] == "warnings"  # what was critical is over
    assert summary["forewarn/alerts/L101-non-finite-loss"] == (
        "resolved: The training loss is NaN or infinite · last seen at step 20"
    )


def test_a_run_that_begins_after_watch_is_found(tmp_path, caplog):
    def log(step, loss):
        if step == 4:
            wandb.init(project="p", dir=Path.cwd())
        if step >= 5:
            wandb.log({"loss": loss})

    train([forewarn.WandbView()], log)
    wandb.finish()
    assert min(row["forewarn/step"] for row in history(tmp_path).values() if "forewarn/step" in row) >= 5
    assert [line for line in caplog.messages if "W&B" in line] == [
        "no W&B run is active, so nothing is written to it; call wandb.init() first, or pass WandbView(run)"
    ]


def test_a_run_that_is_finished_before_the_monitor_is_closed_does_no_harm(tmp_path, caplog):
    wandb.init(project="p", dir=Path.cwd())
    with caplog.at_level(logging.WARNING, "forewarn"):
        monitor = train([forewarn.WandbView()], lambda step, loss: wandb.log({"loss": loss}), before_end=wandb.finish)
    assert "X109" not in {alert.code for alert in monitor.alerts}
    assert not [line for line in caplog.messages if "W&B" in line]
    assert len(history(tmp_path)) == STEPS


def test_several_runs_in_one_process_each_get_their_own(tmp_path):
    for name, scale in (("a", 1), ("b", 2)):
        wandb.init(project="p", dir=tmp_path / name, reinit=True)
        train([forewarn.WandbView()], lambda step, loss, scale=scale: wandb.log({"loss": scale * loss}), run=name)
        wandb.finish()
    for name, scale in (("a", 1), ("b", 2)):
        rows = history(tmp_path / name)
        assert [row["loss"] for row in rows.values()] == [scale * float(step) for step in range(STEPS)]
        assert sum("forewarn/train/loss" in row for row in rows.values()) > STEPS / 2


# MLflow


def of_mlflow(run_id, name):
    return {each.step: each.value for each in mlflow.MlflowClient().get_metric_history(run_id, name)}


def test_readings_parameters_and_alerts_are_in_the_active_run_of_mlflow():
    with mlflow.start_run() as active:
        mlflow.log_param("lr", "mine")
        monitor = train([forewarn.MLflowView()], lambda step, loss: mlflow.log_metric("loss", loss, step=step), 90)
    run_id = active.info.run_id
    assert of_mlflow(run_id, "forewarn/train/loss") == pytest.approx(recorded(monitor), rel=1e-6)
    assert of_mlflow(run_id, "forewarn/monitor/grad_median") == pytest.approx(
        recorded(monitor, "monitor/grad_median"), rel=1e-6
    )
    assert of_mlflow(run_id, "loss") == {step: float(step) for step in range(90)}
    run = mlflow.get_run(run_id)
    assert run.data.params["lr"] == "mine"
    assert run.data.params["forewarn/lr"] == "0.01"
    assert run.data.params["forewarn/dropout"] == "0.1"
    assert run.data.tags["forewarn/verdict"] == "warnings"  # what was critical is over
    assert run.data.tags["forewarn/run"] == str(monitor.path.absolute())
    assert run.data.tags["forewarn/alerts/L101-non-finite-loss"] == (
        "resolved: The training loss is NaN or infinite · last seen at step 20"
    )
    assert len(mlflow.search_runs()) == 1


def test_a_resumed_run_of_mlflow_goes_on_without_a_second_run():
    with mlflow.start_run() as active:
        monitor = train([forewarn.MLflowView()])
    with mlflow.start_run(run_id=active.info.run_id):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)  # a parameter of MLflow can never be changed
        with forewarn.watch(model, optimizer, monitor.path, resume=True, views=[forewarn.MLflowView()]) as resumed:
            for _ in range(5):
                model(torch.randn(16, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                resumed.step(1.0)
    assert set(of_mlflow(active.info.run_id, "forewarn/train/loss")) == set(range(STEPS + 5)) - {SPIKE}
    assert mlflow.get_run(active.info.run_id).data.params["forewarn/lr"] == "0.01"


def test_a_server_of_mlflow_that_is_down_is_one_alert_and_one_line(monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr("forewarn.views.sending.SECONDS_AT_THE_END", 3.0)
    client = mlflow.MlflowClient("http://user:s3cr3t@127.0.0.1:9")
    with caplog.at_level(logging.WARNING, "forewarn"):
        monitor = train([forewarn.MLflowView("0" * 32, client=client)], lambda step, loss: time.sleep(0.02))
    assert [alert.code for alert in monitor.alerts].count("X109") == 1
    assert len([line for line in caplog.messages if line.startswith("MLflow takes no readings")]) == 1
    assert "s3cr3t" not in " ".join(line for line in caplog.messages if "MLflow takes" in line)


# trackio


def of_trackio(name):
    from trackio.sqlite_storage import SQLiteStorage

    return [(row["step"], row[name]) for row in SQLiteStorage.get_logs("p", "r") if name in row]


def test_readings_and_alerts_are_in_the_run_of_trackio():
    trackio.init(project="p", name="r", embed=False, auto_log_cpu=False)
    monitor = train(
        [forewarn.TrackioView()], lambda step, loss: trackio.log({"loss": loss}) if step % 10 == 9 else 0, 90
    )
    trackio.log({"test": 1.0})
    trackio.finish()
    assert dict(of_trackio("forewarn/train/loss")) == pytest.approx(recorded(monitor), rel=1e-6)
    assert of_trackio("loss") == [(at, float(10 * at + 9)) for at in range(9)]
    assert of_trackio("test") == [(9, 1.0)]
    assert of_trackio("forewarn/gradient/histogram")
    (run,) = trackio.Api().runs("p")
    assert run.config["forewarn"]["lr"] == 0.01
    assert run.config["forewarn"]["dropout"] == 0.1
    alerts = [(alert["title"], alert["level"], alert["step"]) for alert in run.alerts()]
    assert ("L101 non-finite-loss: The training loss is NaN or infinite", "error", SPIKE) in alerts
    assert "L101 non-finite-loss: resolved" in {title for title, level, _ in alerts if level == "info"}


# All of them


def make(name):
    if name == "wandb":
        wandb.init(project="p", dir=Path.cwd())
        return forewarn.WandbView(detail="full")
    if name == "mlflow":
        mlflow.start_run()
        return forewarn.MLflowView(detail="full")
    trackio.init(project="p", name="r", embed=False, auto_log_cpu=False)
    return forewarn.TrackioView(detail="full")


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_no_random_number_is_drawn(name):
    view = make(name)
    states = []
    for views in ([], [view]):
        seed_everything(0)
        train(views, run="run")
        states.append(random_states())
    assert str(states[0]) == str(states[1])


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_full_detail_has_every_layer(name, tmp_path):
    view = make(name)
    train([view])
    if name == "wandb":
        wandb.finish()
        names = {key for row in history(tmp_path).values() for key in row}
    elif name == "mlflow":
        names = set(mlflow.get_run(mlflow.active_run().info.run_id).data.metrics)
    else:
        trackio.finish()
        names = {"forewarn/weight/0.weight/norm"} if of_trackio("forewarn/weight/0.weight/norm") else set()
    assert "forewarn/weight/0.weight/norm" in names


# The trainers that report to a tracker


def is_told_of_its_steps(rows):
    """Whether W&B got the 12 steps in their order, but for those that a busy machine sent after a later row."""
    told = [row["forewarn/step"] for row in rows.values() if "forewarn/train/loss" in row]
    return told == sorted(set(told)) and set(told) <= set(range(12)) and len(told) > 6


def hugging_face(report_to, **given):
    from transformers import Trainer, TrainingArguments

    from forewarn.integrations.huggingface import ForewarnCallback
    from tests.integrations.tiny import llama, rows

    callback = ForewarnCallback(views=[], every=5, **given)
    args = TrainingArguments(
        "out", max_steps=12, logging_steps=4, report_to=report_to, use_cpu=True, disable_tqdm=True,
        save_strategy="no", per_device_train_batch_size=4, dataloader_pin_memory=False, run_name="r", project="p",
    )  # fmt: skip
    Trainer(llama(), args, train_dataset=rows(48), callbacks=[callback]).train()
    return callback.monitor


def test_the_hugging_face_trainer_brings_its_wandb_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "p")
    wandb.init(project="p", dir=Path.cwd())
    hugging_face(["wandb"])
    wandb.finish()
    rows = history(tmp_path)
    assert [row["train/global_step"] for row in rows.values() if "train/loss" in row] == [4, 8, 12]
    assert is_told_of_its_steps(rows)
    assert len(list(tmp_path.rglob("*.wandb"))) == 1


def test_the_hugging_face_trainer_brings_its_run_of_mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", tmp_path.name)
    monitor = hugging_face(["mlflow"])
    (run_id,) = mlflow.search_runs()["run_id"]
    assert of_mlflow(run_id, "forewarn/train/loss") == pytest.approx(recorded(monitor), rel=1e-6)
    assert set(of_mlflow(run_id, "loss")) == {4, 8, 12}


def test_the_hugging_face_trainer_brings_its_run_of_trackio():
    monitor = hugging_face(["trackio"])
    assert dict(of_trackio("forewarn/train/loss")) == pytest.approx(recorded(monitor), rel=1e-6)
    assert [step for step, _ in of_trackio("train/loss")] == [0, 1, 2]  # as trackio counts without forewarn


def test_the_hugging_face_trainer_brings_its_folder_of_tensorboard(tmp_path):
    monitor = hugging_face(["tensorboard"])
    (folder,) = {path.parent for path in tmp_path.rglob("forewarn/*tfevents*")}
    assert list(folder.parent.glob("*tfevents*"))
    assert of_tensorboard(folder, "train/loss") == pytest.approx(recorded(monitor), rel=1e-6)


def of_tensorboard(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_trackers_of_a_trainer_can_be_left_alone(tmp_path):
    hugging_face(["tensorboard", "trackio"], trackers=False)
    assert not list(tmp_path.rglob("forewarn/*tfevents*"))
    assert not of_trackio("forewarn/train/loss")


def in_lightning(logger, **given):
    import lightning.pytorch as lightning

    from forewarn.integrations.lightning import ForewarnCallback
    from tests.integrations.test_lightning import Regression, batches

    callback = ForewarnCallback("run", views=[], every=5, **given)
    trainer = lightning.Trainer(
        max_epochs=2, logger=logger, callbacks=[callback], log_every_n_steps=4, accelerator="cpu",
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Regression(), batches(), batches(2))
    return callback.monitor


def test_lightning_brings_its_wandb_run(tmp_path):
    from lightning.pytorch.loggers import WandbLogger

    in_lightning(WandbLogger(project="p", save_dir=tmp_path, offline=True))
    wandb.finish()
    rows = history(tmp_path)
    assert is_told_of_its_steps(rows)
    assert [row["trainer/global_step"] for row in rows.values() if "val_loss" in row] == [5, 11]
    assert len(list(tmp_path.rglob("*.wandb"))) == 1


def test_lightning_brings_its_run_of_mlflow(tmp_path, mlflow_store):
    from lightning.pytorch.loggers import MLFlowLogger

    logger = MLFlowLogger(tmp_path.name, tracking_uri=mlflow_store)
    monitor = in_lightning(logger)
    assert of_mlflow(logger.run_id, "forewarn/train/loss") == pytest.approx(recorded(monitor), rel=1e-6)
    assert of_mlflow(logger.run_id, "val_loss")


def test_lightning_brings_its_folder_of_tensorboard(tmp_path):
    from lightning.pytorch.loggers import TensorBoardLogger

    logger = TensorBoardLogger(tmp_path)
    monitor = in_lightning(logger)
    losses = of_tensorboard(Path(logger.log_dir, "forewarn"), "train/loss")
    assert losses == pytest.approx(recorded(monitor), rel=1e-6)
    assert of_tensorboard(logger.log_dir, "val_loss")


def test_a_view_of_the_user_is_not_doubled(tmp_path):
    from forewarn.integrations.trackers import with_trackers

    wandb.init(project="p", dir=Path.cwd())
    mine = forewarn.WandbView(detail="full")
    assert with_trackers([mine], [partial(forewarn.WandbView, own_rows=True)]) == [mine]
    assert len(with_trackers(None, [partial(forewarn.MLflowView, topk=-1)])) == 1  # a wrong one is left out


def test_the_code_of_the_page_runs():
    """That of docs/trackers.md, as pasted."""
    text = (Path(__file__).parents[2] / "docs" / "trackers.md").read_text()
    for code in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        names = {}
        exec(compile(code, "trackers.md", "exec"), names)
    rows = history(Path(names["run"].dir).parent)
    assert sorted(rows) == list(range(20))
    assert sum("forewarn/train/loss" in row for row in rows.values()) > 1

"""Logs that the real tools write while they train: what is read is what was logged, and the right rule fires."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from forewarn.cli import main
from forewarn.importing import find_logs, import_log
from forewarn.store import open_run

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

STEPS = range(0, 600, 10)


def falling(step):
    return 1.0 + 2.0 * math.exp(-step / 150) + 0.02 * math.sin(7 * step)


def rising(step):
    return falling(step) + (3.0 if step >= 250 else 0.0)


def imported(log, folder):
    import_log(log.read(), folder)
    return open_run(folder)


def judged(path, capsys):
    """The codes of the warnings that `forewarn check` finds."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["check", str(path), "--json"])
    assert end.value.code in (0, 1, 2)
    answer = json.loads(capsys.readouterr().out)
    return {alert["code"] for alert in answer["alerts"] if alert["severity"] != "info"}


def assert_read(run, curve):
    series = run.series("train/loss")
    assert series.steps.tolist() == list(STEPS)
    assert series.values.tolist() == [np.float32(curve(step)) for step in STEPS]
    assert run.series("train/lr", "0").values.tolist() == [np.float32(1e-3)] * len(STEPS)
    times = series.times
    assert ((times > 1.7e9) & (np.diff(times, prepend=times[0]) >= 0)).all()


WANDB = """
import math, sys, wandb
run = wandb.init(mode="offline", dir=sys.argv[1], config={"lr": 1e-3, "name": "x"})
fault = sys.argv[2] == "faulty"
for step in range(0, 600, 10):
    loss = 1.0 + 2.0 * math.exp(-step / 150) + 0.02 * math.sin(7 * step) + (3.0 if fault and step >= 250 else 0.0)
    run.log({"train/loss": loss, "lr": 1e-3, "table": {"a": step}, "text": "x" * 3000,
             "histogram": wandb.Histogram([1, 2, 3])}, step=step)
run.finish()
"""


@pytest.mark.parametrize("kind", ["healthy", "faulty"])
def test_an_offline_run_of_wandb(kind, tmp_path, capsys):
    pytest.importorskip("wandb")
    environment = {**os.environ, "WANDB_SILENT": "true", "WANDB_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", WANDB, str(tmp_path), kind], check=True, env=environment)
    (log,) = find_logs(tmp_path / "wandb")
    with imported(log, tmp_path / "run") as run:
        assert_read(run, falling if kind == "healthy" else rising)
        assert run.info.hyperparameters["lr"] == 1e-3
    expected = set() if kind == "healthy" else {"L107"}
    assert judged(tmp_path / "wandb", capsys) == judged(tmp_path / "run", capsys)
    assert expected <= judged(tmp_path / "wandb", capsys)
    assert kind == "faulty" or judged(tmp_path / "wandb", capsys) == set()


NANOGPT = """
import sys, wandb
run = wandb.init(mode="offline", dir=sys.argv[1])
for step in range(0, 600, 10):
    run.log({"iter": step, "train/loss": 3 - step / 300, "lr": 1e-3})
    if step % 100 == 0:
        run.log({"val/loss": 3 - step / 400})
run.finish()
"""


def test_a_run_of_wandb_has_the_steps_that_its_script_counts(tmp_path):
    """nanoGPT logs `iter` and passes no step, so W&B counts calls."""
    pytest.importorskip("wandb")
    environment = {**os.environ, "WANDB_SILENT": "true", "WANDB_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", NANOGPT, str(tmp_path)], check=True, env=environment)
    (log,) = find_logs(tmp_path / "wandb")
    with imported(log, tmp_path / "run") as run:
        assert run.series("train/loss").steps.tolist() == list(STEPS)
        assert run.series("eval/loss").steps.tolist() == list(range(0, 600, 100))


MLFLOW = """
import math, sys, mlflow
mlflow.set_tracking_uri(sys.argv[1])
with mlflow.start_run(run_name="first"):
    mlflow.log_param("lr", 1e-3)
    for step in range(0, 600, 10):
        mlflow.log_metrics({"train/loss": 1.0 + 2.0 * math.exp(-step / 150) + 0.02 * math.sin(7 * step), "lr": 1e-3,
                            "nan": math.nan, "infinite": math.inf}, step=step)
"""


@pytest.mark.parametrize("store", ["sqlite", "file"])
def test_a_run_of_mlflow(store, tmp_path, capsys):
    pytest.importorskip("mlflow")
    place = tmp_path / ("mlflow.db" if store == "sqlite" else "mlruns")
    address = f"sqlite:///{place}" if store == "sqlite" else place.as_uri()
    environment = {**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true"}
    subprocess.run(
        [sys.executable, "-c", MLFLOW, address], check=True, env=environment, cwd=tmp_path, capture_output=True
    )
    (log,) = find_logs(place)
    with imported(log, tmp_path / "run") as run:
        assert_read(run, falling)
        assert np.isnan(run.series("logged/nan").values).all()
        assert np.isposinf(run.series("logged/infinite").values).all()
        assert run.info.hyperparameters["lr"] == 1e-3
    assert judged(place, capsys) == set()


class Samples(Dataset):
    """Noisy clusters; with few samples and wrong labels, there is nothing to learn but the samples."""

    def __init__(self, number, seed, wrong=0.0):
        generator = torch.Generator().manual_seed(seed)
        centers = 1.2 * torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
        self.labels = torch.randint(5, (number,), generator=generator)
        self.inputs = centers[self.labels] + torch.randn(number, 16, generator=generator)
        is_wrong = torch.rand(number, generator=generator) < wrong
        self.labels = torch.where(is_wrong, torch.randint(5, (number,), generator=generator), self.labels)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"x": self.inputs[index], "labels": self.labels[index]}


class Classifier(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 5))

    def forward(self, x, labels=None):
        logits = self.body(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


TRAINED = {
    "healthy": ({"learning_rate": 1e-3, "num_train_epochs": 4, "logging_steps": 10}, 64, 1600, 0.0, set()),
    "learning rate too low": (
        {"learning_rate": 1e-8, "num_train_epochs": 4, "logging_steps": 10, "lr_scheduler_type": "constant"},
        64, 1600, 0.0, {"L105"},
    ),
    "overfitting": (
        {"learning_rate": 3e-3, "num_train_epochs": 40, "logging_steps": 5, "lr_scheduler_type": "constant"},
        256, 200, 0.4, {"E101", "E104"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", TRAINED)
def test_the_state_of_a_hugging_face_trainer(kind, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    settings, width, number, wrong, expected = TRAINED[kind]
    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path / "out", per_device_train_batch_size=16, eval_strategy="epoch", save_strategy="epoch",
        save_total_limit=2, report_to=["tensorboard"], use_cpu=True, disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = transformers.Trainer(
        Classifier(width), arguments, train_dataset=Samples(number, 2, wrong), eval_dataset=Samples(400, 3, wrong)
    )
    trainer.train()
    (log,) = find_logs(tmp_path / "out")
    with imported(log, tmp_path / "run") as run:
        logged = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
        series = run.series("train/loss")
        assert series.steps.tolist() == list(logged)
        assert series.values.tolist() == [np.float32(loss) for loss in logged.values()]
        assert len(run.series("evaluation/epoch")) == settings["num_train_epochs"]
        assert run.info.hyperparameters["total_steps"] == trainer.state.max_steps
        assert np.isnan(series.times).all()
    printed = capsys.readouterr().out
    (tmp_path / "train.log").write_text(printed)
    with imported(*find_logs(tmp_path / "train.log"), tmp_path / "printed") as run:
        assert run.series("train/loss").values.tolist() == pytest.approx(list(logged.values()), rel=1e-3)
        assert len(run.series("eval/loss")) == settings["num_train_epochs"]
    warnings = judged(tmp_path / "out", capsys)
    assert expected <= warnings
    if kind == "healthy":
        assert warnings == set()
        (folder,) = (tmp_path / "out" / "runs").iterdir() if (tmp_path / "out" / "runs").exists() else [None]
        assert folder is None or judged(folder, capsys) == set()


def test_what_lightnings_loggers_write(tmp_path, capsys):
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
    from lightning.pytorch.utilities import grad_norm

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Classifier(64)

        def training_step(self, batch, index):
            loss = self.model(**batch)["loss"]
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch, index):
            self.log("val_loss", self.model(**batch)["loss"])

        def on_before_optimizer_step(self, optimizer):
            self.log_dict(grad_norm(self, norm_type=2))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    torch.manual_seed(0)
    loggers = [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="tb")]
    trainer = lightning.Trainer(
        max_epochs=4, logger=loggers, log_every_n_steps=10, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", enable_checkpointing=False, callbacks=[LearningRateMonitor("step")],
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(Samples(1600, 2), 16, shuffle=True), DataLoader(Samples(400, 3), 16))
    for name in ("csv", "tb"):
        (log,) = find_logs(tmp_path / name)
        with imported(log, tmp_path / f"run-{name}") as run:
            assert run.series("train/loss").steps.tolist() == list(range(9, 400, 10))
            assert len(run.series("eval/loss")) == len(run.series("evaluation/epoch")) == 4
            assert len(run.series("evaluation/train_loss")) == 4
            assert run.series("train/lr", "0").values[-1] == np.float32(1e-3)
            assert "model.body.0.weight" in run.scopes("gradient/norm")
            assert (run.series("gradient/global_norm").values > 0).all()
        assert judged(tmp_path / name, capsys) == set()

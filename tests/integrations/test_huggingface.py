"""`ForewarnCallback` in the real trainers of transformers and TRL."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("transformers")

from transformers import Trainer, TrainerCallback, TrainingArguments

import forewarn
from forewarn.integrations.huggingface import STATE_NAME, ForewarnCallback
from tests.bitwise import plain, random_states, seed_everything
from tests.integrations.tiny import Float64Step, everything, llama, ratios, rows, series, weights

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]


def arguments(folder, **settings) -> TrainingArguments:
    return TrainingArguments(
        str(folder),
        **{
            "per_device_train_batch_size": 4, "max_steps": 12, "learning_rate": 1e-2, "use_cpu": True, "report_to": [],
            "disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False, "logging_steps": 1,
        } | settings,
    )  # fmt: skip


def callback(**settings) -> ForewarnCallback:
    return ForewarnCallback(**{"views": [], "every": 1} | settings)


class Recorder(TrainerCallback):
    """Computes in float64 what each step should read."""

    def __init__(self):
        self.batches, self.steps, self.ratios, self.lrs = [], [], [], []

    def on_step_begin(self, args, state, control, **kwargs):
        self.batches, self.before = [], weights(kwargs["model"])

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.steps.append(Float64Step(kwargs["model"], self.batches))
        self.lrs.append(kwargs["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, args, state, control, **kwargs):
        self.ratios.append(ratios(self.before, weights(kwargs["model"])))


def recorded(trainer) -> Recorder:
    """A recorder that sees every micro-batch of this trainer."""
    recorder, training_step = Recorder(), trainer.training_step

    def keeping(model, inputs, *args):
        recorder.batches.append(dict(inputs))
        return training_step(model, inputs, *args)

    trainer.training_step = keeping
    trainer.add_callback(recorder)
    return recorder


@pytest.mark.parametrize("settings", [
    {"max_grad_norm": 0.5},
    {"max_grad_norm": 0.5, "gradient_accumulation_steps": 3, "lr_scheduler_type": "cosine", "warmup_steps": 4},
    {"max_grad_norm": 0.0, "gradient_accumulation_steps": 2},
])  # fmt: skip
def test_readings_equal_a_computation_in_float64(tmp_path, settings):
    forewarned = callback(config={"measure": {"sample_size": 10**6}})
    trainer = Trainer(llama(), arguments(tmp_path, **settings), train_dataset=rows(44), callbacks=[forewarned])
    expected = recorded(trainer)
    trainer.train()
    run, limit = tmp_path / "forewarn", settings["max_grad_norm"] or math.inf
    norms = [step.norm for step in expected.steps]
    assert len(norms) == 12
    assert series(run, "train/loss") == pytest.approx([step.loss for step in expected.steps], rel=1e-5)
    assert series(run, "gradient/global_norm") == pytest.approx(norms, rel=1e-4)
    assert series(run, "gradient/global_norm_clipped") == pytest.approx([min(norm, limit) for norm in norms], rel=1e-4)
    assert max(norms) > 0.5  # it does clip
    for group in range(2):
        assert series(run, "train/lr", str(group)) == pytest.approx(expected.lrs)
        assert series(run, "train/lr_plan", str(group)) == pytest.approx(expected.lrs, abs=2e-3 * 1e-2)
    for name in expected.ratios[0]:
        true = [step[name] for step in expected.ratios]
        assert series(run, "update/ratio", name) == pytest.approx(true, rel=1e-3), name
    with forewarn.open_run(run) as stored:
        assert ("train/clip" in stored.names()) == math.isfinite(limit)
        assert set(series(run, "gradient/backward_passes")) <= {1, settings.get("gradient_accumulation_steps", 1), 2}
        assert stored.series("activation/std", "model.layers.0.mlp.down_proj").values.all()
        assert stored.end[0] == "completed"


def test_training_is_bit_identical_with_and_without(tmp_path):
    def outcome(callbacks):
        seed_everything(3)
        settings = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5}
        given = arguments(tmp_path / str(len(callbacks)), gradient_accumulation_steps=2, **settings)
        trainer = Trainer(
            llama(attention_dropout=0.1), given, train_dataset=rows(40), eval_dataset=rows(8), callbacks=callbacks
        )
        trainer.train()
        own = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "train_runtime"}
        logs = [{name: log[name] for name in log if name not in own} for log in trainer.state.log_history[:-1]]
        return plain(trainer.model.state_dict()), plain(trainer.optimizer.state_dict()), random_states(), logs

    assert outcome([]) == outcome([callback()])


class BreaksAt(Trainer):
    """A trainer whose loss is NaN, or that raises, at a step."""

    step, error = 5, None

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        if self.model.training and self.state.global_step == self.step:
            if self.error is not None:
                raise self.error
            return loss * math.nan
        return loss


def test_a_nan_is_named_although_the_log_hides_it(tmp_path):
    forewarned = callback()
    trainer = BreaksAt(llama(), arguments(tmp_path), train_dataset=rows(40), callbacks=[forewarned])
    trainer.train()
    assert [math.isnan(loss) for loss in series(tmp_path / "forewarn", "train/loss")[:6]] == [False] * 5 + [True]
    assert ("non-finite-loss", 5) in [(alert.name, alert.since) for alert in forewarned.monitor.alerts]
    assert not any(math.isnan(log.get("loss", 0.0)) for log in trainer.state.log_history)


def test_the_stop_policy_ends_the_training(tmp_path):
    trainer = BreaksAt(llama(), arguments(tmp_path), train_dataset=rows(40), callbacks=[callback(policy="stop")])
    trainer.train()
    assert trainer.state.global_step == 6


@pytest.mark.parametrize(("moved", "settings"), [
    (False, {"save_steps": 4, "eval_strategy": "epoch"}),
    (False, {"save_steps": 5, "eval_strategy": "no", "max_grad_norm": 0}),
    (True, {"save_steps": 4, "eval_strategy": "steps", "eval_steps": 3, "lr_scheduler_type": "cosine"}),
])  # fmt: skip
def test_a_resumed_training_continues_its_run_without_a_gap(tmp_path, moved, settings):
    """Epochs have five steps, so the checkpoint is in the middle of one, at its end, or after its last evaluation."""

    def trainer(folder, kind=Trainer):
        seed_everything(3)
        given = arguments(folder, save_strategy="steps", gradient_accumulation_steps=2, **settings)
        return kind(llama(), given, train_dataset=rows(40), eval_dataset=rows(8), callbacks=[callback()])

    trainer(tmp_path / "whole").train()
    broken = trainer(tmp_path / "broken", BreaksAt)
    broken.step, broken.error = 6, ArithmeticError("no more")
    with pytest.raises(ArithmeticError):
        broken.train()
    run = tmp_path / "broken" / "forewarn"
    with forewarn.open_run(run) as stored:
        assert (stored.end[0], stored.last_step) == ("ArithmeticError: no more", 5)
    assert broken.training_step.__func__ is Trainer.training_step
    assert "clip_grad_norm_" not in vars(broken.accelerator)
    checkpoint = tmp_path / "broken" / f"checkpoint-{settings['save_steps']}"
    if moved:
        checkpoint = checkpoint.rename(tmp_path / "elsewhere")
    trainer(tmp_path / "broken").train(resume_from_checkpoint=str(checkpoint) if moved else True)
    assert everything(run) == everything(tmp_path / "whole" / "forewarn")
    planned = series(tmp_path / "whole" / "forewarn", "train/lr_plan", "0")
    assert series(run, "train/lr_plan", "0") == pytest.approx(planned, abs=2e-3 * 1e-2)  # read anew from the scheduler
    assert not (tmp_path / "broken" / "forewarn-2").exists()


def test_a_training_that_resumes_without_a_saved_state_keeps_the_numbers_of_its_steps(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 4}
    Trainer(llama(), arguments(tmp_path, **settings), train_dataset=rows(40)).train()
    resumed = Trainer(llama(), arguments(tmp_path, **settings), train_dataset=rows(40), callbacks=[callback()])
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    with forewarn.open_run(tmp_path / "forewarn") as run:
        assert run.series("train/loss").steps.tolist() == [8, 9, 10, 11]
    (tmp_path / "checkpoint-8" / STATE_NAME).write_text("damaged")
    resumed = Trainer(llama(), arguments(tmp_path, **settings), train_dataset=rows(40), callbacks=[callback()])
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    with forewarn.open_run(tmp_path / "forewarn-2") as run:
        assert run.series("train/loss").steps.tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize(("settings", "repeated"), [
    ({"eval_strategy": "epoch"}, {}),
    ({"eval_strategy": "steps", "eval_steps": 2}, {}),
    ({"eval_strategy": "steps", "eval_steps": 4, "eval_on_start": True}, {5: 3}),
])  # fmt: skip
def test_an_evaluation_may_come_at_any_step_and_an_epoch_is_judged_by_its_last(tmp_path, settings, repeated):
    trainer = Trainer(
        llama(), arguments(tmp_path, max_steps=13, **settings), train_dataset=rows(24), eval_dataset=rows(8),
        compute_metrics=lambda predicted: {"accuracy @ 1": np.float32(0.25), "confusion": [1, 2]},
        callbacks=[callback()],
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()  # after the training: not of this run
    logs = [log for log in trainer.state.log_history[:-1] if "eval_loss" in log]
    evaluated = {max(0, log["step"] - 1): log["eval_loss"] for log in logs}
    with forewarn.open_run(tmp_path / "forewarn") as run:
        losses, epochs = run.series("eval/loss"), run.series("evaluation/epoch")
        expected = evaluated | {step: evaluated[earlier] for step, earlier in repeated.items()}
        assert dict(zip(losses.steps.tolist(), losses.values, strict=True)) == pytest.approx(expected)
        assert (epochs.steps.tolist(), epochs.values.tolist()) == ([5, 11], [1, 2])  # the third was cut short
        assert set(run.series("eval/accuracy___1").values.tolist()) == {0.25}
        train_losses = run.series("train/loss").values
        expected = [train_losses[:6].mean(), train_losses[6:12].mean()]
        assert run.series("evaluation/train_loss").values.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_healthy_run_raises_no_alert(tmp_path, caplog):
    forewarned = callback()
    given = arguments(tmp_path, max_steps=150, learning_rate=2e-3, warmup_steps=15, eval_strategy="epoch")
    trainer = Trainer(llama(), given, train_dataset=rows(120), eval_dataset=rows(20), callbacks=[forewarned])
    trainer.train()
    assert [alert for alert in forewarned.monitor.alerts if alert.severity >= forewarn.Severity.WARNING] == []
    assert [record for record in caplog.records if record.name == "forewarn"] == []
    losses = series(tmp_path / "forewarn", "train/loss")
    assert losses[-1] < losses[0] / 2


class Recovers(Trainer):
    """A trainer that runs out of memory with batches of more than two."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        if len(inputs["labels"]) > 2:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(model, inputs, num_items_in_batch)


def test_auto_find_batch_size_leaves_one_run(tmp_path):
    given = arguments(tmp_path, per_device_train_batch_size=3, auto_find_batch_size=True)
    Recovers(llama(), given, train_dataset=rows(40), callbacks=[callback()]).train()
    assert [path.name for path in tmp_path.glob("forewarn*")] == ["forewarn"]
    with forewarn.open_run(tmp_path / "forewarn") as run:
        assert run.series("train/loss").steps.tolist() == list(range(12))
        assert (run.end[0], run.info.hyperparameters["batch_size"]) == ("completed", 2)


def test_report_to_forewarn_watches_and_a_second_training_gets_a_new_name(tmp_path):
    trainer = Trainer(llama(), arguments(tmp_path, report_to="forewarn"), train_dataset=rows(40))
    trainer.train()
    trainer.train()
    assert len(series(tmp_path / "forewarn", "train/loss")) == 12
    assert len(series(tmp_path / "forewarn-2", "train/loss")) == 12


RAISES_IN_THE_DATA = """
import sys
from transformers import Trainer
from forewarn.integrations.huggingface import ForewarnCallback
from tests.integrations.test_huggingface import arguments, llama, rows

class Data(list):
    def __getitem__(self, index):
        if index == 39:
            raise LookupError("no row 39")
        return super().__getitem__(index)

given = arguments(sys.argv[1], train_sampling_strategy="sequential")
Trainer(llama(), given, train_dataset=Data(rows(40)), callbacks=[ForewarnCallback(views=[])]).train()
"""


def test_an_exception_between_steps_is_recorded_when_the_process_ends(tmp_path):
    done = subprocess.run([sys.executable, "-c", RAISES_IN_THE_DATA, tmp_path], capture_output=True, text=True)
    assert "LookupError: no row 39" in done.stderr
    with forewarn.open_run(tmp_path / "forewarn") as run:
        assert (run.end[0], run.last_step) == ("LookupError: no row 39", 7)  # its batch is fetched one step ahead


def test_two_processes_record_one_run_with_the_gradients_of_both(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "-m", "tests.integrations.launched_trainer", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    run, expected = tmp_path / "forewarn", json.loads((tmp_path / "expected.json").read_text())
    assert series(run, "train/loss") == pytest.approx(expected["losses"], rel=1e-4)
    assert series(run, "gradient/global_norm") == pytest.approx(expected["norms"], rel=1e-3)
    clipped = [min(norm, 0.5) for norm in expected["norms"]]
    assert series(run, "gradient/global_norm_clipped") == pytest.approx(clipped, rel=1e-3)
    with forewarn.open_run(run) as stored:
        assert (stored.end[0], stored.info.hyperparameters["batch_size"]) == ("completed", 16)
        assert stored.series("gradient/missing", "never_used.weight").values.all()
        assert not [alert.scope for alert in stored.alerts() if alert.code.startswith("X")]


def test_bfloat16_is_read_as_it_is_trained(tmp_path):
    trainer = Trainer(llama(), arguments(tmp_path, bf16=True), train_dataset=rows(40), callbacks=[callback()])
    expected = recorded(trainer)
    trainer.train()
    run = tmp_path / "forewarn"
    assert series(run, "train/loss") == pytest.approx([step.loss for step in expected.steps], rel=2e-2)
    assert series(run, "gradient/global_norm") == pytest.approx([step.norm for step in expected.steps], rel=5e-2)


def test_wrong_arguments_are_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(TypeError, match="run must be the path of a directory, not"):
        ForewarnCallback(llama())
    with pytest.raises(ValueError, match="unknown setting 'evry'"):
        ForewarnCallback(config={"evry": 3})
    with pytest.raises(ValueError, match="policy must be 'observe', 'stop', 'autopilot'"):
        Trainer(llama(), arguments(tmp_path), train_dataset=rows(40), callbacks=[callback(policy="halt")]).train()

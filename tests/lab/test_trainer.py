import json
import logging
import os
import random
import re
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import forewarn
from forewarn.lab import (
    Callback,
    CallbackError,
    EarlyStopping,
    GradientMonitorCallback,
    Trainer,
    TrainerCallback,
    TrainerConfig,
)
from forewarn.lab.data import TokenBatches, classification, stdlib_text
from forewarn.lab.gpt import GPT, GPTConfig
from forewarn.lab.snapshots import Snapshots, load_snapshot


def token_loss(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt_trainer(tmp_path, name="gpt", seed=0, callbacks=(), **settings):
    torch.manual_seed(seed)
    model = GPT(GPTConfig(context=16, depth=2, heads=2, width=32, dropout=0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    config = TrainerConfig(
        **{"result_dir": str(tmp_path), "model_name": name, "steps_per_epoch": 50, "epochs": 4, **settings}
    )
    trainer = Trainer(model, optimizer, token_loss, config, callbacks, scheduler=scheduler, views=[])
    return trainer, TokenBatches(stdlib_text(200_000), batch_size=4, context=16, seed=0)


def mlp_trainer(tmp_path, name="mlp", callbacks=(), lr=1e-2, views=(), **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    config = TrainerConfig(**{"result_dir": str(tmp_path), "model_name": name, **settings})
    samples, labels = classification(120, 8, 3)
    loader = DataLoader(TensorDataset(samples, labels), batch_size=16, shuffle=True)
    return Trainer(model, optimizer, functional.cross_entropy, config, callbacks, views=views), loader


class Losses(Callback):
    """Keeps every loss, and can interrupt like a person at the keyboard."""

    def __init__(self, interrupt_at=None):
        self.losses = []
        self.interrupt_at = interrupt_at

    def on_step_end(self, trainer):
        self.losses.append(trainer.loss.item())
        if trainer.step == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)


def series(path, name, scope=""):
    with forewarn.open_run(path) as run:
        found = run.series(name, scope)
        return found.steps.tolist(), found.values.tolist()


@pytest.mark.parametrize("monitored", [True, False])
def test_two_times_100_steps_equal_200_steps_bit_for_bit_and_leave_no_seam(tmp_path, monitored):
    settings = {"enable_weight_monitor": monitored, "weight_monitor_interval": 7, "snapshot_interval": 50}
    whole = Losses()
    trainer, batches = gpt_trainer(tmp_path, "whole", callbacks=[whole], **settings)
    trainer.train(batches)
    assert trainer.step == 200

    first, second = Losses(), Losses()
    started, batches = gpt_trainer(tmp_path, "parts", callbacks=[first], **settings, max_steps=100)
    started.train(batches)
    torch.manual_seed(999)
    resumed, batches = gpt_trainer(tmp_path, "parts", seed=5, callbacks=[second], **settings)
    resumed.train(batches, resume=True)

    assert first.losses + second.losses == whole.losses
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name])
    for name, scope in (("train/loss", ""), ("train/loss_ema", ""), ("gradient/global_norm", ""), ("train/lr", "0")):
        parts = series(tmp_path / "parts" / "run", name, scope)
        assert parts == series(tmp_path / "whole" / "run", name, scope)
        assert parts[0] == list(range(200))
    if monitored:
        name = ("update/ratio", "blocks.0.mlp.input.weight")
        assert series(tmp_path / "parts" / "run", *name) == series(tmp_path / "whole" / "run", *name)


def test_ctrl_c_saves_a_snapshot_and_a_resume_goes_on_bit_for_bit_even_inside_an_epoch(tmp_path):
    whole = Losses()
    trainer, loader = mlp_trainer(tmp_path, "whole", [whole], epochs=4)
    validation = [classification(40, 8, 3, seed=1)]
    trainer.train(loader, validation)

    first, second = Losses(interrupt_at=13), Losses()
    started, loader = mlp_trainer(tmp_path, "parts", [first], epochs=4)
    started.train(loader, validation)
    assert started.interrupted
    with forewarn.open_run(tmp_path / "parts" / "run") as run:
        assert run.end[0] == "interrupted by Ctrl-C"
    resumed, loader = mlp_trainer(tmp_path, "parts", [second], epochs=4)
    resumed.train(loader, validation, resume=True)
    assert first.losses + second.losses == whole.losses
    assert len(whole.losses) == 4 * 8
    assert series(tmp_path / "parts" / "run", "eval/loss") == series(tmp_path / "whole" / "run", "eval/loss")


def test_python_and_numpy_random_numbers_go_on_as_well(tmp_path):
    class Draws(Losses):
        def on_step_begin(self, trainer):
            self.losses.append((random.random(), np.random.rand()))

    random.seed(1)
    np.random.seed(1)
    whole = Draws()
    trainer, loader = mlp_trainer(tmp_path, "whole", [whole], epochs=2)
    trainer.train(loader)
    random.seed(1)
    np.random.seed(1)
    first, second = Draws(), Draws()
    started, loader = mlp_trainer(tmp_path, "parts", [first], epochs=1)
    started.train(loader)
    random.seed(77)
    resumed, loader = mlp_trainer(tmp_path, "parts", [second], epochs=2)
    resumed.train(loader, resume=True)
    assert first.losses + second.losses == whole.losses


def test_accumulated_batches_equal_one_large_batch(tmp_path):
    samples, labels = classification(64, 8, 3)
    states = []
    for name, size, accumulation in (("large", 32, 1), ("small", 8, 4)):
        torch.manual_seed(0)
        model = nn.Linear(8, 3)
        trainer = Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), functional.cross_entropy,
            TrainerConfig(result_dir=str(tmp_path), model_name=name, accumulation_steps=accumulation), views=[],
        )  # fmt: skip
        trainer.train(DataLoader(TensorDataset(samples, labels), batch_size=size))
        assert trainer.step == 2
        assert trainer.monitor.info.hyperparameters["micro_batch_size"] == size
        states.append(model.weight.detach())
    torch.testing.assert_close(*states)


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_trains_and_reads_unscaled_gradients(tmp_path, amp):
    trainer, loader = mlp_trainer(tmp_path, amp=amp, epochs=2, enable_weight_monitor=True, weight_monitor_interval=1)
    trainer.train(loader)
    norms = trainer.monitor.history.series("gradient/global_norm").values
    assert len(norms) >= 14
    assert 0.01 < np.median(norms) < 10
    assert (trainer.scaler is not None) == (amp == "fp16")


class Recorder(Callback):
    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda trainer: self.events.append(name)
        return super().__getattribute__(name)


def test_callbacks_are_called_in_order(tmp_path):
    recorder = Recorder()
    trainer, loader = mlp_trainer(tmp_path, callbacks=[recorder], max_steps=1)
    trainer.train(loader, loader)
    assert recorder.events == [
        "on_train_begin", "on_epoch_begin", "on_step_begin", "on_backward_end", "on_step_end", "on_validation_end",
        "on_epoch_end", "on_train_end",
    ]  # fmt: skip


def test_a_callback_that_raises_is_named(tmp_path):
    class Broken(Callback):
        def on_backward_end(self, trainer):
            raise ZeroDivisionError("oops")

    trainer, loader = mlp_trainer(tmp_path, callbacks=[Broken()])
    with pytest.raises(CallbackError, match="the callback Broken failed in on_backward_end: ZeroDivisionError: oops"):
        trainer.train(loader)
    with forewarn.open_run(tmp_path / "mlp" / "run") as run:
        assert "Broken" in run.end[0]


def test_early_stopping_waits_restores_the_best_and_says_why(tmp_path):
    stopping = EarlyStopping(patience=2, restore_best=True)
    trainer, loader = mlp_trainer(tmp_path, callbacks=[stopping], epochs=20)
    losses = iter([1.0, 0.8, 0.9, 0.85])
    weights = []

    def validate(data):
        weights.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
        return next(losses)

    trainer.validate = validate
    trainer.train(loader, loader)
    assert trainer.epoch == 4
    assert "no improvement of the validation loss in 2 validations (best 0.8)" in trainer.stop_reason
    assert all(torch.equal(value, weights[1][name]) for name, value in trainer.model.state_dict().items())
    assert series(tmp_path / "mlp" / "run", "eval/loss")[1] == pytest.approx([1.0, 0.8, 0.9, 0.85])


def test_early_stopping_counts_only_improvements_beyond_min_delta(tmp_path):
    trainer, loader = mlp_trainer(tmp_path, callbacks=[EarlyStopping(patience=1, min_delta=0.1)], epochs=20)
    losses = iter([1.0, 0.95])
    trainer.validate = lambda data: next(losses)
    trainer.train(loader, loader)
    assert trainer.epoch == 2


def test_snapshots_keep_the_last_n_and_can_be_deleted_in_the_end(tmp_path):
    trainer, loader = mlp_trainer(
        tmp_path, epochs=2, snapshot_interval=2, keep_last_n_snapshots=2, snapshot_per_epoch=False
    )
    trainer.train(loader)
    assert [path.name for path in trainer.snapshots.all()] == ["step-00000014.pt", "step-00000016.pt"]
    other, loader = mlp_trainer(tmp_path, "other", epochs=1, delete_snapshots_after_training=True)
    other.train(loader)
    assert other.snapshots.all() == []


def test_a_full_disk_while_saving_keeps_the_last_good_snapshot_and_training_goes_on(tmp_path, monkeypatch, caplog):
    trainer, loader = mlp_trainer(tmp_path, epochs=3, keep_last_n_snapshots=1)
    save = torch.save

    def full(state, file):
        if state["step"] > 8:
            file.write(b"half of it")
            raise OSError(28, "No space left on device")
        save(state, file)

    monkeypatch.setattr(torch, "save", full)
    with caplog.at_level(logging.ERROR, logger="forewarn"):
        trainer.train(loader)
    assert trainer.step == 24
    assert "No space left on device" in caplog.text
    assert [path.name for path in (tmp_path / "mlp" / "snapshots").iterdir()] == ["step-00000008.pt"]
    assert load_snapshot(trainer.snapshots.all()[0])["step"] == 8


def test_a_damaged_snapshot_is_passed_over_for_the_one_before(tmp_path, caplog):
    trainer, loader = mlp_trainer(tmp_path, epochs=2)
    trainer.train(loader)
    newest = trainer.snapshots.all()[-1]
    newest.write_bytes(newest.read_bytes()[:100])
    assert trainer.snapshots.newest()["step"] == 8
    assert "not a readable snapshot" in caplog.text


def test_a_snapshot_can_not_run_code(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path / 'harm'}",))

    Snapshots(tmp_path, 1).save(1, {"step": 1, "model": Harmful()})
    with pytest.raises(ValueError, match="not a readable snapshot"):
        load_snapshot(tmp_path / "step-00000001.pt")
    assert not (tmp_path / "harm").exists()


def test_the_run_of_a_different_model_is_not_resumed_and_a_new_one_goes_beside_it(tmp_path):
    trainer, loader = mlp_trainer(tmp_path, max_steps=1)
    trainer.train(loader)
    other = nn.Linear(8, 3)
    stranger = Trainer(
        other, torch.optim.SGD(other.parameters(), lr=0.1), functional.cross_entropy,
        TrainerConfig(result_dir=str(tmp_path), model_name="mlp"), views=[],
    )  # fmt: skip
    with pytest.raises(ValueError, match="holds the results of a different model"):
        stranger.train(loader, resume=True)
    stranger.train([next(iter(loader))])
    assert stranger.config.directory == tmp_path / "mlp-2"


def test_resume_without_a_snapshot_starts_from_the_beginning(tmp_path):
    trainer, loader = mlp_trainer(tmp_path, max_steps=2)
    trainer.train(loader, resume=True)
    assert trainer.step == 2


def test_without_the_weight_monitor_no_tensor_is_measured(tmp_path):
    trainer, loader = mlp_trainer(tmp_path, epochs=3)
    trainer.train(loader)
    with forewarn.open_run(tmp_path / "mlp" / "run") as run:
        assert not [name for name in run.names() if name.startswith(("weight/", "update/ratio", "gradient/mean"))]
        assert {"train/loss", "train/loss_ema", "gradient/global_norm"} <= set(run.names())


def test_the_thresholds_of_the_config_reach_the_monitor(tmp_path):
    trainer, loader = mlp_trainer(
        tmp_path, max_steps=1, vanishing_grad_threshold=1e-5, exploding_grad_threshold=50.0,
        frozen_update_ratio_threshold=1e-9, frozen_patience_steps=4, weight_monitor_sample_size=64, ema_decay=0.9,
        enable_ema_loss=False,
    )  # fmt: skip
    trainer.train(loader)
    config = trainer.monitor.config
    assert config.thresholds.vanishing_gradient.tensor_norm == 1e-5
    assert config.thresholds.exploding_gradient.warning == 50.0
    assert config.thresholds.frozen_weight.ratio == 1e-9
    assert config.thresholds.frozen_weight.patience == 4
    assert config.measure.sample_size == 64
    assert "train/loss_ema" not in trainer.monitor.history


def test_every_field_of_the_config_is_read_somewhere():
    sources = "".join(path.read_text() for path in (forewarn_source() / "lab").glob("*.py"))
    fields = TrainerConfig.__dataclass_fields__
    unread = [name for name in fields if not re.search(rf"(self|config)\.{name}\b|_changed\(\"{name}\"", sources)]
    assert unread == []


def forewarn_source():
    from pathlib import Path

    return Path(forewarn.__file__).parent


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"amp": "int8"}, "amp must be one of off, bf16, fp16"),
        ({"max_steps": 0}, "max_steps must be at least 1"),
        ({"model_name": "../x"}, "plain name without slashes"),
        ({"ema_decay": 1.5}, "ema_decay must be between"),
    ],
)
def test_settings_out_of_range_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        TrainerConfig(**setting)


def test_results_lie_under_the_name_of_the_model(tmp_path):
    trainer, loader = mlp_trainer(tmp_path, "small", max_steps=1)
    trainer.train(loader)
    assert sorted(path.name for path in (tmp_path / "small").iterdir()) == ["model.json", "run", "snapshots"]
    assert json.loads((tmp_path / "small" / "model.json").read_text())["0.weight"] == [16, 8]


def test_a_run_cut_inside_an_epoch_by_max_steps_goes_on_inside_it(tmp_path):
    whole, first, second = Losses(), Losses(), Losses()
    trainer, loader = mlp_trainer(tmp_path, "whole", [whole], epochs=3)
    trainer.train(loader)
    started, loader = mlp_trainer(tmp_path, "parts", [first], epochs=3, max_steps=13)
    started.train(loader)
    resumed, loader = mlp_trainer(tmp_path, "parts", [second], epochs=3)
    resumed.train(loader, resume=True)
    assert first.losses + second.losses == whole.losses


def test_a_loader_with_a_generator_of_its_own_goes_on_bit_for_bit(tmp_path):
    def loader():
        samples, labels = classification(120, 8, 3)
        return DataLoader(
            TensorDataset(samples, labels), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3)
        )

    whole, first, second = Losses(), Losses(interrupt_at=13), Losses()
    trainer, _ = mlp_trainer(tmp_path, "whole", [whole], epochs=4)
    trainer.train(loader())
    started, _ = mlp_trainer(tmp_path, "parts", [first], epochs=4)
    started.train(loader())
    resumed, _ = mlp_trainer(tmp_path, "parts", [second], epochs=4)
    resumed.train(loader(), resume=True)
    assert first.losses + second.losses == whole.losses


def test_resume_without_a_snapshot_keeps_the_earlier_run_and_begins_anew(tmp_path):
    trainer, loader = mlp_trainer(tmp_path, max_steps=5, snapshot_per_epoch=False)
    trainer.train(loader)
    again, loader = mlp_trainer(tmp_path, max_steps=3)
    again.train(loader, resume=True)
    assert again.step == 3
    with forewarn.open_run(tmp_path / "mlp" / "run-1") as run:
        assert run.last_step == 4


def test_numbers_of_numpy_do_not_make_a_snapshot_unreadable(tmp_path):
    trainer, loader = mlp_trainer(tmp_path, max_steps=2, lr=np.float64(0.01))
    trainer.train(loader)
    assert trainer.snapshots.newest()["step"] == 2


def test_a_scheduler_that_waits_for_the_validation_loss_gets_it(tmp_path):
    trainer, loader = mlp_trainer(tmp_path, epochs=4)
    trainer.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer, patience=0, factor=0.5)
    trainer.validate = lambda data: 1.0
    trainer.train(loader, loader)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.5**3)


def test_the_same_trainer_goes_on_after_ctrl_c(tmp_path):
    trainer, loader = mlp_trainer(tmp_path, callbacks=[Losses(interrupt_at=3)], epochs=2)
    trainer.train(loader)
    assert trainer.step == 3
    trainer.train(loader, resume=True)
    assert trainer.step == 16


def test_the_state_of_a_callback_that_is_left_out_is_left_out(tmp_path):
    trainer, loader = mlp_trainer(tmp_path, callbacks=[EarlyStopping(), Losses()], epochs=1)
    trainer.train(loader, loader)
    again, loader = mlp_trainer(tmp_path, callbacks=[Losses()], epochs=2)
    again.train(loader, loader, resume=True)
    assert again.epoch == 2


@pytest.mark.parametrize("never", [0, None])
def test_0_and_none_mean_never_for_snapshots_and_clipping(tmp_path, never):
    trainer, loader = mlp_trainer(tmp_path, snapshot_interval=never, snapshot_per_epoch=False, gradient_clip=never)
    trainer.train(loader)
    assert not list((tmp_path / "mlp").glob("snapshots/step-*"))
    with forewarn.open_run(tmp_path / "mlp" / "run") as run:
        assert run.config["hyperparameters"]["gradient_clip"] == 0
        assert "train/clip" not in run.names()


def test_the_monitor_takes_a_config_and_settings_of_the_trainer_that_were_changed_win(tmp_path):
    plain = {
        "measure": {"ema_decay": 0.5, "sample_size": 64, "blocks": "0|3"},
        "hyperparameters": {"dropout": 0.2, "width": 16},
        "thresholds": {
            "exploding_gradient": {"warning": 7.0}, "vanishing_gradient": {"global_norm": 1e-5},
            "frozen_weight": {"patience": 9},
        },
    }  # fmt: skip
    settings = {"ema_decay": 0.9, "vanishing_grad_threshold": 1e-4, "hyperparameters": {"width": 32}}
    trainer, loader = mlp_trainer(tmp_path, monitor=forewarn.Config.from_dict(plain), **settings)
    trainer.train(loader)
    config = trainer.monitor.config
    assert (config.measure.ema_decay, config.measure.sample_size, config.measure.blocks) == (0.9, 64, "0|3")
    assert (config.hyperparameters["dropout"], config.hyperparameters["width"]) == (0.2, 32)
    bounds = config.thresholds
    assert (bounds.exploding_gradient.warning, bounds.frozen_weight.patience) == (7.0, 9)
    assert (bounds.vanishing_gradient.global_norm, bounds.vanishing_gradient.tensor_norm) == (1e-5, 1e-4)
    assert TrainerConfig.from_dict({"monitor": plain}).monitor == forewarn.Config.from_dict(plain)
    with pytest.raises(ValueError, match=r"monitor\.thresholds"):
        TrainerConfig.from_dict({"monitor": {"thresholds": {"exploding": {}}}})
    assert TrainerConfig(exploding_grad_threshold=5e3).monitor_config({}).thresholds.exploding_gradient.critical == 5e3


def test_the_trainer_is_found_under_the_name_that_people_look_for():
    import forewarn.trainer
    from forewarn import lab

    assert forewarn.trainer.__all__ == lab.__all__
    assert all(getattr(forewarn.trainer, name) is getattr(lab, name) for name in lab.__all__)


def test_every_event_is_called_in_order_and_counts_from_0(tmp_path):
    class Events(TrainerCallback):
        def __init__(self):
            self.seen = []

        def __getattribute__(self, name):
            if name.startswith("on_"):
                return lambda trainer: self.seen.append((name, trainer.epoch, trainer.step))
            return super().__getattribute__(name)

    events = Events()
    trainer, loader = mlp_trainer(tmp_path, callbacks=[events], epochs=2, steps_per_epoch=1)
    trainer.train(loader, loader)
    epochs = [
        [("on_epoch_begin", n, n), ("on_step_begin", n, n), ("on_backward_end", n, n), ("on_step_end", n, n + 1),
         ("on_validation_end", n, n + 1), ("on_epoch_end", n, n + 1)]
        for n in (0, 1)
    ]  # fmt: skip
    assert events.seen == [("on_train_begin", 0, 0), *epochs[0], *epochs[1], ("on_train_end", 2, 2)]
    assert {name for name, *_ in events.seen} == {name for name in dir(Callback) if name.startswith("on_")}


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_the_gradient_monitor_reads_what_the_optimizer_would_get_without_clipping(tmp_path, capsys, amp):
    class Norms(Callback):
        def __init__(self):
            self.norms = []

        def on_backward_end(self, trainer):
            gradients = [parameter.grad.double().flatten() for parameter in trainer.model.parameters()]
            self.norms.append(float(torch.cat(gradients).norm()))

    norms, gradients = Norms(), GradientMonitorCallback(log_frequency=4)
    trainer, loader = mlp_trainer(tmp_path, callbacks=[norms, gradients], gradient_clip=0.01, amp=amp)
    trainer.train(loader)
    summary = gradients.monitor.get_summary()
    assert (summary.count, summary.unit) == (2, "step")
    assert summary.mean == pytest.approx((norms.norms[3] + norms.norms[7]) / 2, rel=1e-4)
    recorded = series(tmp_path / "mlp" / "run", "gradient/global_norm")[1]
    assert norms.norms == pytest.approx(recorded, rel=1e-3), "before the clip, and not scaled"
    printed = capsys.readouterr().err
    assert [f"step {step}: gradient norm" in printed for step in (1, 4, 8)] == [False, True, True]
    assert str(summary) in printed


def test_the_gradient_monitor_goes_on_after_a_resume(tmp_path):
    whole = GradientMonitorCallback(1, verbose=False)
    trainer, loader = mlp_trainer(tmp_path, "whole", [whole], epochs=2)
    trainer.train(loader)
    parts = [GradientMonitorCallback(1, verbose=False) for _ in range(2)]
    started, loader = mlp_trainer(tmp_path, "parts", [parts[0]], epochs=1)
    started.train(loader)
    resumed, loader = mlp_trainer(tmp_path, "parts", [parts[1]], epochs=2)
    resumed.train(loader, resume=True)
    assert parts[1].monitor.get_summary() == whole.monitor.get_summary()


def test_layers_are_printed_every_n_steps_with_what_was_recorded(tmp_path, capsys):
    trainer, loader = mlp_trainer(tmp_path, views=None, log_layers=4, log_interval=1000)
    trainer.train(loader)
    lines = capsys.readouterr().err.splitlines()
    heads = [number for number, line in enumerate(lines) if re.match(r"step \d+ +norm +mean +std +ratio$", line)]
    assert [lines[head].split()[1] for head in heads] == ["4", "8"]
    rows = {row.split()[0]: row.split()[1:] for row in lines[heads[1] + 1 : heads[1] + 5]}
    assert list(rows) == ["0.weight", "0.bias", "3.weight", "3.bias"]
    for column, name in enumerate(("gradient/norm", "gradient/mean", "gradient/std", "update/ratio")):
        steps, values = series(tmp_path / "mlp" / "run", name, "3.weight")
        assert steps == [3, 7], "only these steps are measured"
        assert float(rows["3.weight"][column]) == pytest.approx(values[-1], rel=1e-2)
    with pytest.raises(ValueError, match="log_layers must be at least 0"):
        TrainerConfig(log_layers=-1)

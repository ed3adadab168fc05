"""Lightning, the real one: what the callback reads is true, and the training is the same with and without it."""

import atexit
import copy
import logging
import math
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import forewarn
from tests.bitwise import plain, random_states, seed_everything

lightning = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from forewarn.integrations.lightning import ForewarnCallback  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

BATCH = 8


def batches(number=6, seed=0, batch=BATCH):
    inputs = torch.randn(number * batch, 4, generator=torch.Generator().manual_seed(seed))
    targets = torch.stack([inputs[:, 0] * inputs[:, 1], inputs[:, 2].sin()], dim=1)
    return DataLoader(TensorDataset(inputs, targets), batch_size=batch)


class Regression(lightning.LightningModule):
    """A small network whose `forward` the training step calls, or not."""

    def __init__(self, through_forward=True, schedule=None, lr=0.05):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        self.through_forward = through_forward
        self.schedule = schedule
        self.lr = lr

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        x, y = batch
        output = self(x) if self.through_forward else self.net(x)
        return 10 * (output - y).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return optimizer if self.schedule is None else self.schedule(optimizer)


class Gan(lightning.LightningModule):
    """Two networks in one module, each with its own optimizer, in manual optimization."""

    def __init__(self, wrapped=True, every=1):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.wrapped, self.every = wrapped, every
        self.norms, self.losses = [], []

    def forward(self, noise):
        return self.generator(noise)

    def training_step(self, batch, batch_idx):
        generate, discriminate = self.optimizers(use_pl_optimizer=self.wrapped)
        real = batch[0]
        noise = torch.randn(len(real), 3)
        binary = nn.functional.binary_cross_entropy_with_logits
        squares, parts = 0.0, self.losses[-1][1:] if self.losses else [0.0, 0.0]
        if batch_idx % self.every == 0:
            self.toggle_optimizer(generate)
            loss = binary(self.discriminator(self(noise)), torch.ones(len(real), 1))
            generate.zero_grad()
            self.manual_backward(loss)
            squares += square(self.generator)
            generate.step()
            self.untoggle_optimizer(generate)
            parts = [loss.item(), parts[1]]
        self.toggle_optimizer(discriminate)
        fake = binary(self.discriminator(self(noise).detach()), torch.zeros(len(real), 1))
        loss = (binary(self.discriminator(real), torch.ones(len(real), 1)) + fake) / 2
        discriminate.zero_grad()
        self.manual_backward(loss)
        squares += square(self.discriminator)
        discriminate.step()
        self.untoggle_optimizer(discriminate)
        parts = [parts[0], loss.item()]
        self.norms.append(math.sqrt(squares))
        self.losses.append([sum(parts), *parts])

    def configure_optimizers(self):
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=2e-3, betas=(0.5, 0.999)) for part in parts], []


def square(module):
    return sum(weight.grad.double().square().sum().item() for weight in module.parameters())


def fit(model, folder, callbacks, train=None, validate=None, ckpt_path=None, **settings):
    settings = {
        "max_epochs": 2,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
    } | settings
    trainer = lightning.Trainer(
        accelerator="cpu", **{"devices": 1, "logger": False} | settings, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(model, train or batches(), validate, ckpt_path=ckpt_path)
    return trainer


@pytest.fixture
def callback(tmp_path):
    return ForewarnCallback(tmp_path / "run", every=1, views=[])


def values(path_or_monitor, name, scope=""):
    path = getattr(path_or_monitor, "path", path_or_monitor)
    with forewarn.open_run(path) as run:
        return run.series(name, scope).values.tolist()


class Replica:
    """The same training in float64 with a loop of its own."""

    def __init__(self, model, *, clip=math.inf, accumulate=1, epochs=2, rates=None, loader=None):
        net = copy.deepcopy(model.net).double()
        weights = list(net.parameters())
        momentum = [torch.zeros_like(weight) for weight in weights]
        self.losses, self.norms, self.clipped, self.ratios, self.rates = [], [], [], [], []
        loader = list(loader or batches())
        for _ in range(epochs):
            for start in range(0, len(loader), accumulate):
                window = loader[start : start + accumulate]
                losses = [10 * (net(x.double()) - y.double()).square().mean() for x, y in window]
                gradients = torch.autograd.grad(sum(losses) / accumulate, weights)
                norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
                factor = min(1.0, clip / norm)
                rate = model.lr if rates is None else rates[len(self.rates)]
                before = weights[0].detach().clone()
                with torch.no_grad():
                    for weight, moment, gradient in zip(weights, momentum, gradients, strict=True):
                        moment.mul_(0.9).add_(gradient * factor)
                        weight.sub_(rate * moment)
                self.losses.append(sum(loss.item() for loss in losses) / len(losses))
                self.norms.append(norm)
                self.clipped.append(norm * factor)
                self.rates.append(rate)
                self.ratios.append(((weights[0] - before).norm() / before.norm()).item())


def close(expected):
    return pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize("through_forward", [True, False], ids=["forward", "net"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_readings_equal_a_float64_computation(tmp_path, callback, through_forward, accumulate):
    """Six batches in windows of four: the second window of an epoch has only two, and Lightning steps all the same."""
    num_steps = 2 * math.ceil(6 / accumulate)

    def schedule(optimizer):
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
        return [optimizer], [{"scheduler": cosine, "interval": "step"}]

    model = Regression(through_forward, schedule)
    rates = [0.05 * (1 + math.cos(math.pi * step / num_steps)) / 2 for step in range(num_steps)]
    true = Replica(model, clip=3.0, accumulate=accumulate, rates=rates)
    fit(model, tmp_path, [callback], gradient_clip_val=3.0, accumulate_grad_batches=accumulate)
    run = callback.monitor
    assert any(norm > 3.0 for norm in true.norms)
    assert values(run, "train/loss") == close(true.losses)
    assert values(run, "gradient/global_norm") == close(true.norms)
    assert values(run, "gradient/global_norm_clipped") == close(true.clipped)
    assert values(run, "update/ratio", "net.0.weight") == close(true.ratios)
    assert values(run, "train/lr", "0") == pytest.approx(rates)
    assert values(run, "train/lr_plan", "0") == pytest.approx(rates, abs=0.05 * 2e-3)
    assert values(run, "train/clip") == [3.0] * num_steps
    assert values(run, "update/optimizer_steps") == [1.0] * num_steps
    assert values(run, "activation/std", "net.0")


def test_a_schedule_per_epoch_is_planned_too(tmp_path, callback):
    def schedule(optimizer):
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    fit(Regression(schedule=schedule), tmp_path, [callback], max_epochs=3)
    expected = [0.05 * 0.5**epoch for epoch in range(3) for _ in range(6)]
    assert values(callback.monitor, "train/lr", "0") == pytest.approx(expected)
    assert values(callback.monitor, "train/lr_plan", "0") == pytest.approx(expected)


class ClipsItself(Regression):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val=2.0, gradient_clip_algorithm="norm")


def test_clipping_by_the_module_is_found(tmp_path, callback):
    model = ClipsItself()
    true = Replica(model, clip=2.0)
    fit(model, tmp_path, [callback])
    assert values(callback.monitor, "gradient/global_norm") == close(true.norms)
    assert values(callback.monitor, "gradient/global_norm_clipped") == close(true.clipped)
    assert values(callback.monitor, "train/clip")[-1] == 2.0


class SeesClipping(Regression):
    """Keeps the norm that the optimizer uses."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.used = [*getattr(self, "used", []), math.sqrt(square(self))]


def test_clipping_by_value_claims_no_limit(tmp_path, callback):
    model = SeesClipping()
    fit(model, tmp_path, [callback], gradient_clip_val=0.1, gradient_clip_algorithm="value")
    assert values(callback.monitor, "gradient/global_norm_clipped") == close(model.used)
    assert values(callback.monitor, "gradient/global_norm")[0] == close(Replica(Regression()).norms[0])
    assert "train/clip" not in callback.monitor.history.names()


class Dropping(Regression):
    def __init__(self):
        super().__init__(schedule=lambda optimizer: [[optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]])
        self.net.insert(1, nn.Dropout(0.3))


KINDS = {
    "accumulated and clipped": (Dropping, {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0}),
    "not through forward": (lambda: Regression(False), {}),
    "bfloat16": (Dropping, {"precision": "bf16-mixed"}),
    "gan": (Gan, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_bit_identical_with_and_without(tmp_path, callback, kind):
    make, settings = KINDS[kind]

    def trained(callbacks):
        seed_everything(0)
        model = make()
        trainer = fit(model, tmp_path, callbacks, validate=None if kind == "gan" else batches(2), **settings)
        return plain(model.state_dict()), [plain(opt.state_dict()) for opt in trainer.optimizers], random_states()

    assert trained([]) == trained([callback])
    assert len(values(callback.monitor, "train/loss")) >= 4


class Poisoned(Regression):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * (math.nan if self.global_step == 9 else 1.0)


def test_a_nan_is_named(tmp_path, callback):
    fit(Poisoned(lr=0.003), tmp_path, [callback])
    assert [(alert.code, alert.since) for alert in callback.monitor.firing][:1] == [("L101", 9)]


def healthy(model, folder, callbacks, **settings):
    return fit(model, folder, callbacks, batches(40), batches(8, seed=1), max_epochs=4, **settings)


@pytest.mark.parametrize("through_forward", [True, False], ids=["forward", "net"])
def test_a_healthy_run_is_silent(tmp_path, through_forward):
    callback = ForewarnCallback(tmp_path / "run", every=10, views=[])
    healthy(Regression(through_forward, lr=0.003), tmp_path, [callback], gradient_clip_val=20.0)
    assert callback.monitor.alerts == ()
    assert values(callback.monitor, "train/loss")[-1] < values(callback.monitor, "train/loss")[0]


def readings(path):
    """Everything in a run but what depends on time and memory."""
    with forewarn.open_run(path) as run:
        names = [name for name in run.names() if not name.startswith(("speed/", "system/")) and "overhead" not in name]
        return {
            (name, scope): (series.steps.tolist(), series.values.tobytes())
            for name in names
            if name != "monitor/resumed"
            for scope in run.scopes(name)
            if (series := run.series(name, scope)) is not None
        }


@pytest.mark.parametrize("at", ["middle of an epoch", "end of an epoch", "validation"])
def test_a_resumed_run_equals_one_that_was_never_interrupted(tmp_path, at):
    def schedule(optimizer):
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24), "interval": "step"}
        ]

    def callback(name):
        return ForewarnCallback(tmp_path / name, every=3, views=[])

    settings = {"validate": batches(2, seed=1), "gradient_clip_val": 3.0}
    straight = callback("straight")
    fit(Regression(schedule=schedule), tmp_path, [straight], max_epochs=4, **settings)
    saving = {
        "middle of an epoch": ModelCheckpoint(tmp_path / "saved", every_n_train_steps=9, save_top_k=1, monitor=None),
        "end of an epoch": ModelCheckpoint(tmp_path / "saved", save_on_train_epoch_end=True),
        "validation": ModelCheckpoint(tmp_path / "saved", monitor="val_loss", save_last=True),
    }[at]
    first = callback("resumed")
    fit(Regression(schedule=schedule), tmp_path, [first, saving], max_epochs=2, **settings)
    second = callback("resumed")
    saved = saving.last_model_path or saving.best_model_path
    fit(Regression(schedule=schedule), tmp_path, [second], max_epochs=4, ckpt_path=saved, **settings)
    assert second.monitor.path == first.monitor.path == tmp_path / "resumed"
    assert values(second.monitor, "monitor/resumed") == [1.0]
    if at == "middle of an epoch":  # this loader cannot resume in the middle: Lightning begins it again
        assert len(values(second.monitor, "train/loss")) == len(values(straight.monitor, "train/loss"))
        return
    theirs, ours = readings(straight.monitor.path), readings(second.monitor.path)
    assert theirs.keys() == ours.keys()
    for key, series in theirs.items():
        if key[0] != "train/lr_plan":  # straight lines between points, and a resumed plan has points of its own
            assert ours[key] == series, key
    assert second.monitor.alerts == straight.monitor.alerts


def test_a_checkpoint_continues_elsewhere_if_its_run_is_gone_or_another_was_asked_for(tmp_path):
    saving = ModelCheckpoint(tmp_path / "saved", save_last=True)
    fit(Regression(), tmp_path, [ForewarnCallback(tmp_path / "first", every=1, views=[]), saving], max_epochs=1)
    other = ForewarnCallback(tmp_path / "other", every=1, views=[])
    fit(Regression(), tmp_path, [other], ckpt_path=saving.last_model_path)
    with forewarn.open_run(tmp_path / "other") as run:
        assert run.series("train/loss").steps.tolist() == list(range(6, 12))
    with forewarn.open_run(tmp_path / "first") as run:
        assert run.last_step == 5


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("every", [1, 3])
def test_a_gan_in_one_module_is_read_right(tmp_path, callback, wrapped, every):
    model = Gan(wrapped, every)
    fit(model, tmp_path, [callback], max_epochs=3)
    monitor = callback.monitor
    assert monitor.at == 18
    assert values(monitor, "gradient/global_norm") == close(model.norms)
    assert values(monitor, "update/optimizer_steps") == [1.0 + (step % 6 % every == 0) for step in range(18)]
    assert values(monitor, "activation/std", "discriminator.0")
    if wrapped or every == 1:  # otherwise which optimizer a loss belongs to is unknown
        assert values(monitor, "train/loss") == close([total for total, *_ in model.losses])
    assert not [alert for alert in monitor.alerts if alert.severity >= forewarn.Severity.WARNING]


class Skipping(Regression):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 2 else {"loss": super().training_step(batch, batch_idx), "extra": 1}


def test_a_step_that_returns_none_has_no_loss(tmp_path, callback):
    fit(Skipping(), tmp_path, [callback], max_epochs=1)
    with forewarn.open_run(callback.monitor.path) as run:
        assert run.series("train/loss").steps.tolist() == [0, 1, 3, 4, 5]


class SecondOrder(Regression):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.last = [*getattr(self, "last", []), (self.global_step, loss.item())]
        return loss

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


def test_lbfgs_runs_the_step_often_and_the_last_loss_counts(tmp_path, callback):
    model = SecondOrder()
    fit(model, tmp_path, [callback], max_epochs=1)
    assert len(model.last) > 6
    assert values(callback.monitor, "train/loss") == close(list(dict(model.last).values()))


def test_the_loss_scale_is_in_no_reading(tmp_path, callback):
    """Half precision on a CPU, where Lightning itself would fall back to bfloat16."""
    model = Regression(lr=0.01)
    true = Replica(model, clip=3.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    fit(model, tmp_path, [callback], plugins=[plugin], gradient_clip_val=3.0)
    rough = pytest.approx(true.norms, rel=0.02)
    assert values(callback.monitor, "gradient/global_norm") == rough
    assert values(callback.monitor, "train/loss") == pytest.approx(true.losses, rel=0.02)
    assert values(callback.monitor, "train/loss_scale") == [1024.0] * 12
    assert values(callback.monitor, "gradient/global_norm_clipped")[0] == pytest.approx(
        min(3.0, true.norms[0]), rel=0.02
    )


class Overflowing(Regression):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1e6 if batch_idx == 3 else 1.0)


def test_a_step_that_the_scaler_skips_is_a_step(tmp_path, callback):
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))
    fit(Overflowing(lr=0.01), tmp_path, [callback], plugins=[plugin], max_epochs=1)
    assert values(callback.monitor, "update/skipped") == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]


class LogsAs(Regression):
    name = "val_loss"

    def validation_step(self, batch, batch_idx):
        assert not self.training
        loss = self.loss(batch)
        self.log(self.name, loss)
        self.seen = [*getattr(self, "seen", []), loss.item()]


@pytest.mark.parametrize("name", ["val_loss", "valid/loss", "Loss/val", "validation_loss", "nll"])
def test_the_validation_loss_of_each_epoch_is_recorded_without_the_sanity_check(tmp_path, name):
    callback = ForewarnCallback(tmp_path / "run", views=[], val_loss="nll" if name == "nll" else None)
    model = LogsAs()
    model.name = name
    fit(model, tmp_path, [callback], validate=batches(1, seed=1), num_sanity_val_steps=1)
    assert values(callback.monitor, "eval/loss") == close(model.seen[1:])
    assert values(callback.monitor, "evaluation/epoch") == [1.0, 2.0]


def test_validation_within_an_epoch_ends_no_epoch(tmp_path, callback):
    model = LogsAs()
    fit(model, tmp_path, [callback], validate=batches(1, seed=1), val_check_interval=2, num_sanity_val_steps=0)
    with forewarn.open_run(callback.monitor.path) as run:
        assert run.series("eval/loss").steps.tolist() == [1, 3, 5, 7, 9, 11]
        assert run.series("eval/loss").values.tolist() == close(model.seen)
        assert run.series("evaluation/epoch").steps.tolist() == [5, 11]


def test_a_wrong_name_of_the_validation_loss_is_said(tmp_path, caplog):
    callback = ForewarnCallback(tmp_path / "run", views=[], val_loss="val_los")
    with caplog.at_level(logging.WARNING, "forewarn"):
        fit(LogsAs(), tmp_path, [callback], validate=batches(1), max_epochs=1)
    assert "the module logs no 'val_los', which is ForewarnCallback's val_loss; it logs val_loss" in caplog.messages


def test_a_critical_alert_stops_the_training_if_asked_to(tmp_path):
    callback = ForewarnCallback(tmp_path / "run", views=[], policy="stop")
    trainer = fit(Poisoned(lr=0.003), tmp_path, [callback], max_epochs=5)
    assert trainer.global_step < 15
    assert trainer.should_stop


def test_early_stopping_of_the_config_stops_the_training(tmp_path):
    callback = ForewarnCallback(tmp_path / "run", views=[], config={"early_stopping_patience": 1})
    trainer = fit(Regression(lr=0.0), tmp_path, [callback], validate=batches(1), max_epochs=9)
    assert trainer.global_step == 12


class Crashing(Regression):
    def training_step(self, batch, batch_idx):
        if self.global_step == 4:
            raise self.error
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_exception_is_recorded_and_leaves_no_hooks(tmp_path, callback, error):
    model = Crashing()
    model.error = error
    with pytest.raises(RuntimeError if isinstance(error, RuntimeError) else SystemExit):
        fit(model, tmp_path, [callback])
    with forewarn.open_run(tmp_path / "run") as run:
        assert run.end[0] == ("RuntimeError: out of memory" if isinstance(error, RuntimeError) else "KeyboardInterrupt")
        assert run.last_step == 3
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_second_fit_is_a_second_run(tmp_path, callback):
    model = Regression()
    trainer = fit(model, tmp_path, [callback], max_epochs=1)
    first = callback.monitor.path
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, batches())
    assert callback.monitor.path == tmp_path / "run-2" != first
    assert callback.monitor.at == 12  # as Lightning counts
    assert not any(optimizer._optimizer_step_post_hooks for optimizer in trainer.optimizers)


def test_fast_dev_run_works(tmp_path, callback):
    fit(Regression(), tmp_path, [callback], validate=batches(1), fast_dev_run=True)
    assert len(values(callback.monitor, "train/loss")) == 1


def test_the_steps_of_a_search_for_the_learning_rate_are_not_recorded(tmp_path, callback):
    finder = LearningRateFinder(num_training_steps=20, update_attr=False)
    fit(Regression(), tmp_path, [callback, finder], max_epochs=1, enable_checkpointing=True)
    assert len(values(callback.monitor, "train/loss")) == 6


class WithoutOptimizer(Regression):
    def configure_optimizers(self):
        return None


def test_a_module_without_an_optimizer_is_not_watched(tmp_path, callback, caplog):
    with caplog.at_level(logging.WARNING, "forewarn"):
        fit(WithoutOptimizer(), tmp_path, [callback], max_epochs=1)
    assert callback.monitor is None
    assert "no optimizer holds a parameter of WithoutOptimizer, so it is not watched" in caplog.messages


def test_the_older_package_works_too(tmp_path, callback):
    other = pytest.importorskip("pytorch_lightning")

    class Older(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Regression().net

        def training_step(self, batch, batch_idx):
            return 10 * (self.net(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    trainer = other.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=2,
        enable_checkpointing=False, callbacks=[callback], gradient_clip_val=3.0,
    )  # fmt: skip
    trainer.fit(Older(), batches())
    true = Replica(Regression(), clip=3.0)
    assert values(callback.monitor, "train/loss") == close(true.losses)
    assert values(callback.monitor, "gradient/global_norm") == close(true.norms)
    assert values(callback.monitor, "train/clip") == [3.0] * 12


class Leaving(Regression):
    """Leaves its group of processes, as Lightning does not: torch may abort a process that ends within one."""

    def on_fit_start(self):
        atexit.register(torch.distributed.destroy_process_group)


def test_under_ddp_the_first_process_records_the_averaged_gradients(tmp_path, callback):
    """Each process trains on every second sample; their mean gradient is that of the whole batch.

    After a validation, Lightning leaves the wrapper in evaluation mode.
    """
    loader = batches(6, batch=BATCH // 2)
    settings = {"devices": 2, "strategy": "ddp_spawn", "gradient_clip_val": 3.0, "accumulate_grad_batches": 3}
    fit(Leaving(False), tmp_path, [callback], loader, batches(2), **settings)
    inputs, targets = loader.dataset.tensors
    half = BATCH // 2
    of_both = [(inputs[at : at + 2 * half], targets[at : at + 2 * half]) for at in range(0, len(inputs), 2 * half)]
    true = Replica(Regression(), clip=3.0, accumulate=3, loader=of_both)
    assert values(tmp_path / "run", "gradient/global_norm") == close(true.norms)
    assert values(tmp_path / "run", "gradient/global_norm_clipped") == close(true.clipped)
    assert values(tmp_path / "run", "update/ratio", "net.0.weight") == close(true.ratios)
    assert values(tmp_path / "run", "activation/std", "net.0")
    assert values(tmp_path / "run", "train/clip") == [3.0] * len(true.norms)
    with forewarn.open_run(tmp_path / "run") as run:
        assert run.end[0] == "completed"
        assert not [alert for alert in run.alerts() if alert.code.startswith("X")]
    assert not (tmp_path / "run-2").exists()


class Copying(Regression):
    def on_train_batch_start(self, batch, batch_idx):
        (callback,) = [callback for callback in self.trainer.callbacks if isinstance(callback, ForewarnCallback)]
        assert pickle.loads(pickle.dumps(callback)).monitor is None
        assert copy.deepcopy(callback).monitor is None
        assert callback.monitor is not None


def test_the_callback_can_be_pickled_while_it_watches(tmp_path, callback):
    fit(Copying(), tmp_path, [callback], max_epochs=1)
    assert len(values(callback.monitor, "train/loss")) == 6


def test_wrong_arguments_are_refused_at_once():
    with pytest.raises(TypeError, match="run must be the path of a directory"):
        ForewarnCallback(Regression())
    with pytest.raises(TypeError, match="val_loss must be the name of a logged metric, not 3"):
        ForewarnCallback(val_loss=3)
    with pytest.raises(TypeError, match="evry"):
        ForewarnCallback(evry=3)


def test_without_lightning_the_error_names_the_package():
    hidden = "import sys; sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None"
    code = f"{hidden}\nimport forewarn.integrations.lightning"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "needs Lightning: pip install 'forewarn[lightning]'" in ended.stderr.splitlines()[-1]

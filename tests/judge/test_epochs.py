"""What an epoch has brought: recorded, judged live and again from the stored run, adjusted where that was asked for."""

import logging
import math

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import forewarn
from forewarn.cli import cli
from forewarn.config import Config
from forewarn.judge.diagnosis import replay
from forewarn.judge.epochs import Epoch, gap_grade, improvement_grade, is_plateau
from forewarn.measure.loss_course import LossCourse
from tests.conftest import last
from tests.judge.rules.test_evaluation import TEXTBOOK

CODES = {"lr too high late": "E102", "model too small": "E105", "overfitting": "E101"}
FIRST_REMEDY = {
    "lr too high late": "lower_lr 0.0003 → 0.0001",
    "model too small": "widen 64 → 128",
    "overfitting": "raise_dropout 0 → 0.1",
}
DECLARED = {"dropout": 0.0, "width": 64, "epochs": 4}


def made(lr=3e-4, weight_decay=0.01):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)


def step(model, optimizer, monitor, loss):
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    monitor.step(loss)


def train(monitor, model, optimizer, losses, steps=3):
    for train_loss, val_loss in losses:
        for _ in range(steps):
            step(model, optimizer, monitor, train_loss)
        monitor.end_epoch(train_loss=train_loss, val_loss=val_loss)


@pytest.mark.parametrize(
    ("rate", "grade"),
    [(-0.1, "poor"), (0.009, "poor"), (0.01, "acceptable"), (0.05, "acceptable"), (0.051, "good"), (math.nan, "")],
)
def test_improvement_in_a_word(rate, grade):
    assert improvement_grade(rate, 0.01) == grade


@pytest.mark.parametrize(
    ("share", "grade"),
    [(-0.2, "healthy"), (0.09, "healthy"), (0.1, "mild"), (0.3, "mild"), (0.31, "severe"), (math.nan, "")],
)
def test_a_gap_in_a_word(share, grade):
    assert gap_grade(share, 0.3) == grade


def test_a_plateau_needs_its_whole_window_and_every_change_in_it_to_be_small():
    assert is_plateau([3.0, 2.0, 2.01, 2.0], 0.01, 3)
    assert not is_plateau([2.0, 2.01], 0.01, 3)
    assert not is_plateau([2.0, 2.03, 2.0], 0.01, 3)


def test_the_series_are_those_of_the_formulas(watch):
    model, optimizer = made()
    monitor = watch(model, optimizer)
    losses = TEXTBOOK["overfitting"]
    train(monitor, model, optimizer, losses)
    trained, validated = np.array(losses).T
    series = monitor.history.series
    assert series("evaluation/train_loss").values == pytest.approx(trained)
    assert series("evaluation/train_loss").steps.tolist() == [2, 5, 8, 11]
    rates = (validated[:-1] - validated[1:]) / validated[:-1]
    assert series("evaluation/improvement_rate").values == pytest.approx(rates, rel=1e-5)
    assert series("evaluation/train_val_gap").values == pytest.approx((validated - trained) / trained, rel=1e-5)
    assert monitor.history.series("eval/loss").values == pytest.approx(validated)
    assert monitor.history.series("evaluation/epoch").values.tolist() == [1, 2, 3, 4]
    assert monitor.history.series("evaluation/plateau_detected").values.tolist() == [0, 0, 0, 0]


def test_without_a_training_loss_it_is_the_mean_of_the_epoch(watch):
    model, optimizer = made()
    monitor = watch(model, optimizer)
    given = np.random.default_rng(0).uniform(1, 3, size=(2, 40))
    for epoch in given:
        for loss in epoch:
            step(model, optimizer, monitor, loss)
        monitor.end_epoch(val_loss=torch.tensor(2.5))
    assert monitor.history.series("evaluation/train_loss").values == pytest.approx(given.mean(axis=1), rel=1e-6)
    assert monitor.history.series("eval/loss").values.tolist() == [2.5, 2.5]
    start, end = monitor.history.series("evaluation/start_loss"), monitor.history.series("evaluation/end_loss")
    assert start.values == pytest.approx([min(given[0, 0], np.median(given[0, :16]))] * 2)
    assert end.values == pytest.approx(np.median(given[:, -16:], axis=1))


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", TEXTBOOK)
def test_the_textbook_runs_live_replayed_and_by_forewarn_check(name, steps, watch, tmp_path):
    model, optimizer = made()
    monitor = watch(model, optimizer, run=tmp_path / "run", config=forewarn.Config(hyperparameters=DECLARED))
    train(monitor, model, optimizer, TEXTBOOK[name], steps)
    alert = monitor.firing[0]
    assert alert.code == CODES[name]
    assert {alert.code for alert in monitor.firing[1:]} <= {"E109"}
    monitor.close()
    with forewarn.open_run(tmp_path / "run") as run:
        assert repr(replay(run, Config.from_stored(run.config).rule_set()).alerts) == repr(monitor.alerts)
    shown = CliRunner().invoke(cli, ["check", str(tmp_path / "run")]).output
    assert f"{alert.name} {alert.code}" in shown
    assert alert.remedies[0].do in shown
    assert str(alert.remedies[0]) == FIRST_REMEDY[name]


def test_check_shows_the_epochs_in_words(watch, tmp_path):
    model, optimizer = made()
    monitor = watch(model, optimizer, run=tmp_path / "run")
    train(monitor, model, optimizer, TEXTBOOK["overfitting"])
    monitor.close()
    shown = CliRunner().invoke(cli, ["check", str(tmp_path / "run")]).output
    assert "epoch 2: train 2.1, validation 2.8, improvement 22% (good), gap 33% (severe)" in shown
    assert "epoch 4: train 0.8, validation 2.7, improvement -3.8% (poor), gap 237.5% (severe)" in shown


def test_without_a_validation_loss_one_sentence_says_so(watch, tmp_path, caplog):
    model, optimizer = made()
    monitor = watch(model, optimizer, run=tmp_path / "run")
    with caplog.at_level(logging.WARNING, "forewarn"):
        train(monitor, model, optimizer, [(3.0, None), (2.0, None), (1.9, None)])
    assert caplog.text.count("no validation loss was given") == 1
    assert "eval/loss" not in monitor.history
    assert monitor.alerts == ()
    monitor.close()
    assert "no validation loss was given" in CliRunner().invoke(cli, ["check", str(tmp_path / "run")]).output


def test_early_stopping_asks_for_a_stop_after_so_many_epochs_without_a_better_loss(watch, small):
    config = forewarn.Config(early_stopping_patience=2, early_stopping_min_delta=0.05)
    monitor = watch(*small, config=config)
    asked = []
    for loss in (1.0, 0.9, 0.88, 0.8, 0.79, 0.81):
        monitor.step(loss)
        monitor.end_epoch(val_loss=loss)
        asked.append(monitor.should_stop)
    assert asked == [False] * 5 + [True]


@pytest.mark.parametrize("patience", [0, 2])
def test_losses_that_still_hold_their_graph_are_taken_as_they_are(watch, patience):
    model, optimizer = made()
    monitor = watch(model, optimizer, config=forewarn.Config(early_stopping_patience=patience))
    step(model, optimizer, monitor, 3.0)
    held = torch.tensor([2.5], requires_grad=True) * 1.0  # pytest makes a warning of torch's an error
    monitor.end_epoch(train_loss=held.sum() + 0.5, val_loss=held)
    assert last(monitor, "eval/loss") == 2.5
    assert last(monitor, "evaluation/train_loss") == 3.0
    assert held.requires_grad


@pytest.mark.parametrize(
    "wrong", [{"val_loss": "2.0"}, {"train_loss": torch.ones(3)}, {"val_loss": np.complex64(1 + 2j)}]
)
def test_a_wrong_loss_is_an_error_that_names_it(wrong, watch):
    monitor = watch(*made())
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        monitor.end_epoch(**wrong)


OF_EPOCHS = ("evaluation/epoch", "evaluation/improvement_rate", "evaluation/train_val_gap")


@pytest.mark.parametrize("saved", [True, False], ids=["from its state", "from the stored run"])
def test_a_resumed_run_goes_on_with_its_epochs(saved, watch, tmp_path):
    model, optimizer = made()
    losses = TEXTBOOK["overfitting"]
    whole = watch(model, optimizer, run=tmp_path / "whole")
    train(whole, model, optimizer, losses, 40)
    first = watch(model, optimizer, run=tmp_path / "parts")
    train(first, model, optimizer, losses[:2], 40)
    state = first.state_dict()
    first.close()
    resumed = watch(model, optimizer, run=tmp_path / "parts", resume=True)
    if saved:
        resumed.load_state_dict(state)
    train(resumed, model, optimizer, losses[2:], 40)
    for name in (*OF_EPOCHS, "train/loss_level") if saved else OF_EPOCHS:
        found, wanted = resumed.history.series(name), whole.history.series(name)
        assert found.values.tolist() == wanted.values.tolist()
        assert found.steps.tolist() == wanted.steps.tolist()
    assert [alert.code for alert in resumed.firing] == ["E101", "E109"]


def test_a_resumed_run_knows_epochs_that_lie_beyond_its_memory(watch, tmp_path):
    model, optimizer = made()
    config = forewarn.Config(history_window=64)
    first = watch(model, optimizer, run=tmp_path / "run", config=config)
    train(first, model, optimizer, TEXTBOOK["overfitting"][:3], 100)
    first.close()
    resumed = watch(model, optimizer, run=tmp_path / "run", resume=True, config=config)
    train(resumed, model, optimizer, TEXTBOOK["overfitting"][3:], 100)
    assert resumed.history.series("evaluation/epoch").values.tolist() == [1, 2, 3, 4]
    assert [alert.code for alert in resumed.firing] == ["E101", "E109"]


class TestAdjusting:
    def run(self, watch, name):
        model, optimizer = made()
        monitor = watch(model, optimizer)
        train(monitor, model, optimizer, TEXTBOOK[name])
        return monitor, optimizer

    def test_slow_improvement_lowers_the_lr_once(self, watch, tmp_path):
        monitor, optimizer = self.run(watch, "lr too high late")
        (action,) = monitor.adjust()
        assert (action.code, action.action) == ("E102", "lower_lr")
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
        assert monitor.adjust() == ()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
        monitor.close()
        with forewarn.open_run(tmp_path / "run0") as run:
            assert [each.action for each in run.actions()] == ["lower_lr"]
            assert run.actions()[0].parameters == pytest.approx({"from": 3e-4, "to": 1e-4})

    def test_overfitting_raises_the_weight_decay_and_leaves_the_model_alone(self, watch):
        monitor, optimizer = self.run(watch, "overfitting")
        assert [action.action for action in monitor.adjust()] == ["raise_weight_decay"]
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
        assert optimizer.param_groups[0]["lr"] == 3e-4

    def test_information_changes_nothing(self, watch):
        monitor, optimizer = self.run(watch, "model too small")
        assert monitor.adjust() == ()
        assert optimizer.param_groups[0]["lr"] == 3e-4

    def test_without_asking_nothing_is_ever_changed(self, watch):
        _, optimizer = self.run(watch, "lr too high late")
        assert optimizer.param_groups[0]["lr"] == 3e-4

    def test_what_was_acted_on_is_remembered_across_a_resume(self, watch):
        monitor, _ = self.run(watch, "lr too high late")
        monitor.adjust()
        model, _ = made()
        other = watch(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
        other.load_state_dict(monitor.state_dict())
        assert other.firing
        assert other.adjust() == ()

    @pytest.mark.parametrize("kind", ["lambda", "cosine", "one cycle", "in sequence"])
    def test_a_scheduler_does_not_undo_it(self, watch, kind):
        def rates(factor_at):
            model, optimizer = made(lr=1e-3)
            schedulers = torch.optim.lr_scheduler
            scheduler = {
                "lambda": lambda: schedulers.LambdaLR(optimizer, lambda step: 1 - step / 100),
                "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, 60),
                "one cycle": lambda: schedulers.OneCycleLR(optimizer, 1e-3, total_steps=60),
                "in sequence": lambda: schedulers.SequentialLR(
                    optimizer,
                    [schedulers.LinearLR(optimizer, 0.1, total_iters=5), schedulers.ExponentialLR(optimizer, 0.99)],
                    milestones=[5],
                ),
            }[kind]()
            monitor = watch(model, optimizer)
            seen = []
            for epoch, (train_loss, val_loss) in enumerate([*TEXTBOOK["lr too high late"], (1.97, 2.4)]):
                for _ in range(3):
                    step(model, optimizer, monitor, train_loss)
                    scheduler.step()
                    seen.append(optimizer.param_groups[0]["lr"])
                monitor.end_epoch(train_loss=train_loss, val_loss=val_loss)
                if epoch == factor_at:
                    assert monitor.adjust(scheduler)
            return np.array(seen)

        usual, adjusted = rates(None), rates(3)
        assert adjusted[:12] == pytest.approx(usual[:12])
        assert adjusted[12:] == pytest.approx(usual[12:] / 3, rel=1e-6)


def test_levels_are_the_first_loss_and_medians_of_thirty_two():
    course = LossCourse()
    losses = np.random.default_rng(0).uniform(1, 3, 100)
    found = [(at, level) for at, loss in enumerate(losses) for level in course.add(loss).values()]
    assert [at for at, _ in found] == [0, 31, 63, 95]
    wanted = [losses[0], *(np.median(losses[at : at + 32]) for at in (0, 32, 64))]
    assert [level for _, level in found] == pytest.approx(wanted)
    assert course.add(math.nan) == {}


def test_the_peak_of_an_epoch_is_not_made_by_a_single_batch():
    epoch = LossCourse()
    for loss in [2.0] * 20 + [500.0] + [2.0] * 27:
        epoch.add(loss)
    assert epoch.peak == 2.0
    for loss in [9.0] * 16:
        epoch.add(loss)
    assert epoch.peak == 9.0
    epoch.begin_epoch()
    assert math.isnan(epoch.peak)
    assert math.isnan(epoch.mean)
    assert epoch.start == 2.0


@pytest.mark.parametrize("decay", [0.95, 0.99, 0.999])
def test_the_average_of_white_noise_keeps_less_than_a_tenth_of_its_variance(decay, watch):
    monitor = watch(*made(), every=10_000, config=forewarn.Config(measure=forewarn.Measure(ema_decay=decay)))
    loss = monitor._probes["loss"]
    noise = 2 + np.random.default_rng(0).normal(size=20_000)
    averages = np.array([loss.course.add(value)["train/loss_ema"] for value in noise])[5000:]
    assert averages.var() < 0.1 * noise.var()
    assert averages.var() == pytest.approx((1 - decay) / (1 + decay), rel=0.5)


def test_the_average_is_switched_off_by_one_switch_and_resumed_without_a_seam(watch):
    model, optimizer = made()
    off = watch(model, optimizer, config=forewarn.Config(measure=forewarn.Measure(enable_ema_loss=False)))
    whole, first = watch(model, optimizer), watch(model, optimizer)
    losses = np.random.default_rng(1).uniform(1, 3, 60).tolist()
    for loss in losses:
        off.step(loss)
        whole.step(loss)
    for loss in losses[:25]:
        first.step(loss)
    second = watch(model, optimizer)
    second.load_state_dict(first.state_dict())
    for loss in losses[25:]:
        second.step(loss)
    assert "train/loss_ema" not in off.history
    for name in ("train/loss_ema", "train/loss_level"):
        assert second.history.series(name).values.tolist() == whole.history.series(name).values.tolist()
    ema = losses[0]
    for loss in losses[1:]:
        ema = 0.99 * ema + 0.01 * loss
    assert last(second, "train/loss_ema") == pytest.approx(ema, rel=1e-6)


@pytest.mark.parametrize(("gap", "words"), [(9.994, "gap 999.4% "), (154.5, "gap >1000% "), (-12.0, "gap <-1000% ")])
def test_a_huge_gap_has_no_exponent(gap, words):
    epoch = Epoch(1, 10, 0.01, 1.5, math.nan, "", gap, "severe", False)
    assert words in epoch.words()

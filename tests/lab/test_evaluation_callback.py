"""The evaluation of epochs on the reference trainer."""

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import forewarn
from forewarn import PostEpochEvaluationCallback
from forewarn.judge.diagnosis import replay
from forewarn.lab import Trainer, TrainerConfig
from forewarn.lab.networks import MLP


def by_heart(tmp_path, *callbacks, epochs=6, validate=True, **settings):
    """An MLP that learns 64 samples with labels that mean nothing."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(128, 16), torch.randint(5, (128,))
    loader = DataLoader(TensorDataset(inputs[:64], labels[:64]), batch_size=8, shuffle=True)
    model = MLP([16, 128, 128, 5])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    config = TrainerConfig(
        result_dir=str(tmp_path), epochs=epochs, hyperparameters={"dropout": 0.0, "width": 128}, **settings
    )
    trainer = Trainer(model, optimizer, functional.cross_entropy, config, callbacks, views=[])
    trainer.train(loader, [(inputs[64:], labels[64:])] if validate else None)
    return trainer


def test_every_epoch_is_recorded_and_the_wanted_ones_are_printed(tmp_path, capsys):
    callback = PostEpochEvaluationCallback()
    trainer = by_heart(tmp_path, callback, epochs=4)
    assert [epoch.number for epoch in callback.evaluations] == [2, 3]
    printed = capsys.readouterr().err
    assert [f"epoch {number}:" in printed for number in (1, 2, 3, 4)] == [False, True, True, False]
    assert "improvement" in printed
    assert "(mild)" in printed
    with forewarn.open_run(trainer.config.directory / "run") as run:
        assert run.series("evaluation/epoch").values.tolist() == [1, 2, 3, 4]
        losses = run.series("train/loss").values.reshape(4, 8)
        assert run.series("evaluation/train_loss").values == pytest.approx(losses.mean(axis=1), rel=1e-5)
        assert run.series("eval/loss").steps.tolist() == [7, 15, 23, 31]


def test_epochs_are_listed_from_0_and_printed_from_1(tmp_path, capsys):
    callback = PostEpochEvaluationCallback([0, 2])
    by_heart(tmp_path, callback, epochs=4)
    printed = capsys.readouterr().err
    assert [f"epoch {number}:" in printed for number in (0, 1, 2, 3, 4)] == [False, True, False, True, False]


def test_thresholds_that_are_not_given_stay_those_of_the_monitor(tmp_path):
    monitor = forewarn.Config.from_dict(
        {"thresholds": {"overfitting": {"gap": 9.0}, "slow_improvement": {"improvement": 0.03}}}
    )
    trainer = by_heart(tmp_path, PostEpochEvaluationCallback(plateau_window=5), epochs=2, monitor=monitor)
    thresholds = trainer.monitor.config.thresholds
    assert (thresholds.overfitting.gap, thresholds.slow_improvement.improvement) == (9.0, 0.03)
    assert thresholds.validation_plateau.window == 5


def test_overfitting_is_found_with_the_numbers_of_the_run_live_and_again(tmp_path, capsys):
    trainer = by_heart(tmp_path, PostEpochEvaluationCallback(None))
    alert = next(alert for alert in trainer.monitor.alerts if alert.code == "E101")
    assert [str(each) for each in alert.remedies[:2]] == ["raise_dropout 0 → 0.1", "raise_weight_decay 0.01 → 0.1"]
    assert "Raise dropout from 0 to 0.1" in capsys.readouterr().err
    with forewarn.open_run(trainer.config.directory / "run") as run:
        assert repr(replay(run, forewarn.Config.from_stored(run.config).rule_set()).alerts) == repr(
            trainer.monitor.alerts
        )


def test_its_thresholds_are_those_of_the_run(tmp_path):
    callback = PostEpochEvaluationCallback(improvement_threshold=0.02, gap_threshold=100.0, plateau_window=4)
    trainer = by_heart(tmp_path, callback, epochs=4)
    assert "E101" not in {alert.code for alert in trainer.monitor.alerts}
    thresholds = trainer.monitor.config.thresholds
    assert thresholds.slow_improvement.improvement == thresholds.validation_plateau.change == 0.02
    assert (thresholds.overfitting.gap, thresholds.validation_plateau.window) == (100.0, 4)


def test_it_adjusts_only_if_it_may_and_once_for_one_finding(tmp_path, capsys):
    observed = by_heart(tmp_path / "observed", PostEpochEvaluationCallback(None))
    assert observed.optimizer.param_groups[0]["weight_decay"] == 0.01
    callback = PostEpochEvaluationCallback(None, auto_adjust=True)
    adjusted = by_heart(tmp_path / "adjusted", callback)
    assert adjusted.optimizer.param_groups[0]["weight_decay"] == 0.1
    printed = capsys.readouterr().err
    after = printed[printed.rindex("weight decay from 0.01 to 0.1") :]
    assert "Raise the weight decay from 0.1 to 0.2" in after, "advice goes by what the decay is now"
    findings = [(action.code, action.action) for action in callback.adjustments]
    assert findings.count(("E101", "raise_weight_decay")) == 1
    with forewarn.open_run(adjusted.config.directory / "run") as run:
        assert [(each.code, each.action) for each in run.actions()] == findings


def test_without_validation_data_one_sentence_says_so(tmp_path, capsys):
    trainer = by_heart(tmp_path, PostEpochEvaluationCallback((1,)), epochs=3, validate=False)
    assert trainer.epoch == 3
    assert capsys.readouterr().err.count("no validation loss was given") == 1


def test_an_epoch_that_was_cut_short_is_validated_but_no_epoch(tmp_path):
    trainer = by_heart(tmp_path, PostEpochEvaluationCallback(None), epochs=5, max_steps=12)
    with forewarn.open_run(trainer.config.directory / "run") as run:
        assert run.series("evaluation/epoch").values.tolist() == [1]
        assert run.series("eval/loss").steps.tolist() == [7, 11]
    assert "E108" not in {alert.code for alert in trainer.monitor.alerts}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evaluation_epochs": (-1,)}, "evaluation_epochs must be epochs from 0 on"),
        ({"improvement_threshold": 2.0}, "improvement_threshold must be between 0 and 1"),
        ({"gap_threshold": -0.1}, "gap_threshold must not be negative"),
        ({"plateau_window": 1}, "plateau_window must be at least 2 epochs"),
    ],
)
def test_settings_out_of_range_are_one_sentence(settings, message):
    with pytest.raises(ValueError, match=message):
        PostEpochEvaluationCallback(**settings)

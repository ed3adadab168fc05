"""`forewarn forecast` on a stored run."""

import json

import numpy as np
import pytest
import torch

from forewarn import Config, watch


def stored(path, losses, disable=(), **hyperparameters):
    model = torch.nn.Linear(1, 1)
    config = Config(hyperparameters=hyperparameters, disable=disable)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, optimizer, path, every=10_000, config=config, views=[]) as monitor:
        for loss in losses:
            monitor.step(float(loss))
    return monitor


FALLING = 1.5 + 6 * np.arange(1, 401.0) ** -0.4


def test_it_tells_the_loss_and_when_a_target_is_met(tmp_path, forewarn):
    monitor = stored(tmp_path / "run", FALLING)
    result = forewarn("forecast", str(tmp_path / "run"), "--at", "1000", "--target", "1.95")
    assert result.code == 0
    assert "expected  1000  1.87" in result.out.replace("   ", "  ").replace("   ", "  ")
    plain = json.loads(forewarn("forecast", str(tmp_path / "run"), "--at", "1000", "--json").out)
    assert plain["loss"] == pytest.approx(1.5 + 6 * 1001**-0.4, rel=0.01)
    assert plain["loss"] == pytest.approx(monitor.forecast(1000).loss)


@pytest.mark.parametrize(
    ("total", "at"), [(900, 900), (900.0, 900), (400, 798), (401, 798), (300, 798), (900.5, 798), ("many", 798)]
)
def test_declared_steps_are_what_it_looks_ahead_to_unless_they_are_over(tmp_path, forewarn, total, at):
    stored(tmp_path / "run", FALLING, total_steps=total)
    assert json.loads(forewarn("forecast", str(tmp_path / "run"), "--json").out)["at"] == at


def test_a_target_that_is_met_already_says_so(tmp_path, forewarn):
    stored(tmp_path / "run", FALLING)
    assert "already reached" in forewarn("forecast", str(tmp_path / "run"), "--target", "3").out
    assert json.loads(forewarn("forecast", str(tmp_path / "run"), "--target", "3", "--json").out)["target_step"] == 399


def test_losses_that_are_never_finite_are_said_to_be(tmp_path, forewarn):
    stored(tmp_path / "run", [float("nan")] * 250)
    assert "no loss was recorded that is finite" in forewarn("forecast", str(tmp_path / "run")).out


def test_too_early_is_said_in_a_sentence(tmp_path, forewarn):
    stored(tmp_path / "run", FALLING[:50])
    assert (
        "No forecast: too early to tell, 50 losses are too few; it takes 200."
        in forewarn("forecast", str(tmp_path / "run")).out
    )


def test_what_cannot_be_told_is_an_error(tmp_path, forewarn):
    stored(tmp_path / "run", FALLING)
    result = forewarn("forecast", str(tmp_path / "run"), "--at", "10")
    assert result.code == 3
    assert "not ahead" in result.err


def test_open_warnings_are_named_beside_the_forecast(tmp_path, forewarn):
    monitor = stored(tmp_path / "run", FALLING, disable=("frozen-weight",))  # without a step of the optimizer
    assert monitor.forecast().open_warnings == ("optimizer-not-stepping",)
    result = forewarn("forecast", str(tmp_path / "run"))
    assert (
        "⚠ 1 warning open: optimizer-not-stepping. The run may do worse than this forecast. See: forewarn check"
        in result.out
    )
    plain = json.loads(forewarn("forecast", str(tmp_path / "run"), "--json").out)
    assert plain["open_warnings"] == ["optimizer-not-stepping"]


def test_with_a_critical_alert_open_there_is_no_forecast(tmp_path, forewarn):
    stored(tmp_path / "run", [*FALLING, float("nan")])
    assert "No forecast: non-finite-loss is open and critical.\n" in forewarn("forecast", str(tmp_path / "run")).out


def test_a_run_without_warnings_has_nothing_beside_its_forecast(tmp_path, forewarn):
    stored(tmp_path / "run", FALLING, disable=("optimizer-not-stepping", "frozen-weight"))
    assert "⚠" not in forewarn("forecast", str(tmp_path / "run")).out

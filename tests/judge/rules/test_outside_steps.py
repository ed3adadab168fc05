"""Weights that something else than their optimizer moves."""

import pytest
import torch

from forewarn.types import ParameterInfo, RunInfo
from tests.judge.rules.runs import Run
from tests.real_runs import Breakable


def fed(optimizer, moved, gradient=0.1, lr=1e-3, weight=8.0, **group):
    parameters = {"a.weight": ParameterInfo((8, 8), "Linear.weight", "float32", 0, True)}
    run = Run("U116", info=RunInfo(parameters=parameters, optimizers=(optimizer,), groups=(group,)))
    for _ in range(4):
        run.feed({
            "monitor/update_ratio_median": moved / weight, "update/norm": {"a.weight": moved},
            "update/ratio": {"a.weight": moved / weight}, "gradient/norm": {"a.weight": gradient},
            "train/lr": {"0": lr},
        })  # fmt: skip
    return run.ledger.alerts


def test_a_step_of_adam_is_about_as_large_as_its_learning_rate():
    (alert,) = fed("Adam", moved=0.16)  # 64 weights: a root mean square of 0.02, 20 times the rate
    assert alert.finding.value == pytest.approx(20, rel=1e-5)
    assert fed("Adam", moved=0.07) == ()


def test_weight_decay_is_no_outside_step():
    assert fed("AdamW", moved=0.16, weight_decay=20.0) == ()  # 0.001 x 20 x 8
    clipped_to_nothing = {"moved": 0.08, "gradient": 1e-6, "momentum": 0.9}
    assert fed("SGD", weight_decay=1.0, **clipped_to_nothing) == ()  # 0.001 x 1 x 8, ten times that by its momentum
    assert fed("SGD", weight_decay=0.1, **clipped_to_nothing)


def test_a_step_of_sgd_grows_with_the_gradient_and_momentum():
    assert fed("SGD", moved=0.0004)  # four times lr x gradient
    assert fed("SGD", moved=0.0004, momentum=0.9) == ()


def test_other_optimizers_are_not_judged():
    assert fed("RMSprop", moved=5.0) == ()


def a_second_optimizer(run):
    it = Breakable(run, lr=1e-4)
    other = torch.optim.SGD(it.model.parameters(), lr=0.5, momentum=0.9)
    it.optimizer.register_step_post_hook(lambda *_: other.step())
    return it.train(80)


def weights_that_are_averaged_with_noise(run):
    it = Breakable(run, lr=1e-4)

    def write(*_):
        with torch.no_grad():
            for parameter in it.model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)

    it.optimizer.register_step_post_hook(write)
    return it.train(80)


FAULTS = {"U116": weights_that_are_averaged_with_noise, "U117": a_second_optimizer}

"""The drift of the output logits: a free direction that healthy runs stay near the start of."""

import math

import numpy as np
import pytest
from torch import nn

from forewarn.lab.networks import MLP
from forewarn.types import Severity
from tests.judge.rules.runs import Run
from tests.real_runs import Breakable


def alerts(values):
    return Run("A108").series("activation/log_z", values).ledger.alerts


@pytest.mark.parametrize("sign", [1, -1])
def test_a_drift_to_either_side_is_found_and_says_where_it_began(sign):
    (alert,) = alerts(sign * np.linspace(5, 80, 16))
    assert math.copysign(1, alert.finding.value) == math.copysign(1, alert.finding.bound) == sign
    assert alert.finding.evidence["began_at"] == 5 * sign


def test_the_few_units_of_a_healthy_run_are_quiet():
    noise = np.random.default_rng(0).normal(size=400)
    assert alerts(5.5 + 0.01 * np.arange(400) + noise) == ()


def test_a_scale_that_a_model_was_made_for_is_quiet():
    assert alerts(np.full(100, 70.0)) == (), "contrastive models multiply by a temperature of their own"


def test_logits_beyond_all_precision_are_critical():
    (alert,) = alerts([5.5] * 4 + [-2e4] * 3)
    assert alert.severity is Severity.CRITICAL


def softmax_in_the_model(run):
    return Breakable(run, nn.Sequential(MLP([16, 64, 5]), nn.Softmax(-1))).train(60)


def test_log_probabilities_are_no_second_softmax(tmp_path):
    model = nn.Sequential(MLP([16, 64, 5]), nn.LogSoftmax(-1))
    assert Breakable(tmp_path / "run", model).train(30).alerts == ()


FAULTS = {"A110": softmax_in_the_model}

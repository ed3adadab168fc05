"""The rules of others, on series whose answer follows from their documentation."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from forewarn.lab.faults import published_rules
from forewarn.lab.faults.published_rules import Readings
from forewarn.types import Block, ParameterInfo, RunInfo


def said(name, **series):
    """The steps at which a rule set warns, given `metric=values` or `metric=(scopes, rows)`."""
    length = max(len(values[1] if isinstance(values, tuple) else values) for values in series.values())
    steps = []
    for step in range(length):
        blocks = []
        for metric, values in series.items():
            scopes, row = (values[0], values[1][step]) if isinstance(values, tuple) else (("",), [values[step]])
            blocks.append(Block(step, 0.0, metric.replace("__", "/"), scopes, np.array(row, np.float32)))
        steps.append((step, blocks))
    matrix = ParameterInfo((10, 10), "Linear.weight", "float32", 0, True)
    info = RunInfo(parameters={"first.weight": matrix, "last.weight": matrix})
    readings = Readings(SimpleNamespace(info=info, steps=lambda: steps))
    return [step for step, _ in sorted(getattr(published_rules, name)(readings))]


def test_lightning_fires_three_times_above_the_mean_of_ten_and_forgets_the_spike():
    assert said("lightning", train__loss=[1.0] * 12 + [2.99, 1.0, 3.7, 1.0]) == [14]
    assert said("lightning", train__loss=[1.0, math.nan]) == [1]


def test_olmo_core_fires_six_deviations_above_the_mean_once_half_the_interval_is_seen():
    noise = [1.0, 1.1] * 32
    spread = np.std(noise, ddof=1)
    assert said("olmo_core", train__loss=[*noise, 1.05 + 6.1 * spread]) == [64]
    assert said("olmo_core", train__loss=[*noise, 1.05 + 5.9 * spread]) == []
    assert said("olmo_core", train__loss=[*noise[:60], 50.0]) == []


def test_zclip_fires_two_and_a_half_deviations_above_the_mean_of_the_warm_up():
    noise = [1.0, 2.0] * 12 + [1.5]
    spread = np.std(noise)
    assert said("zclip", gradient__global_norm=[*noise, 1.5 + 2.6 * spread]) == [25]
    assert said("zclip", gradient__global_norm=[*noise, 1.5 + 2.4 * spread]) == []


def test_sagemaker_wants_the_loss_to_fall_by_a_thousandth_in_ten_steps():
    falling = [1.0 - 0.001 * step for step in range(21)]
    assert said("sagemaker", train__loss=falling) == []
    assert said("sagemaker", train__loss=[1.0] * 21) == [10, 20]


@pytest.mark.parametrize(("norm", "steps"), [(9e-7, [0]), (2e-6, [])])
def test_sagemaker_calls_a_gradient_vanishing_below_1e_7_per_value(norm, steps):
    assert said("sagemaker_tensor_rules", gradient__norm=(("first.weight",), [[norm]])) == steps


def test_auto_trainer_compares_the_first_layer_with_the_last():
    scopes = ("first.weight", "last.weight")
    assert said("auto_trainer", gradient__norm=(scopes, [[71.0, 1.0], [69.0, 1.0], [9e-5, 1.0], [2e-4, 0.3]])) == [0, 2]


def test_deep_diagnosis_fires_when_the_loss_repeats_five_times():
    assert said("deep_diagnosis", train__loss=[2.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == [5]
    assert said("deep_diagnosis", train__loss=[2.0, math.inf]) == [1]

"""The epsilon of the optimizer: too large for the gradients, or zero in float16."""

import dataclasses

from forewarn.types import ParameterInfo, RunInfo, Severity
from tests.judge.rules.runs import Run
from tests.real_runs import Breakable


def fed(code, norm, epsilon, dtype="float32", objective="auto"):
    parameters = {"a.weight": ParameterInfo((100, 100), "Linear.weight", dtype, 0, True)}
    run = Run(code, info=RunInfo(parameters=parameters, groups=({"eps": epsilon},), objective=objective))
    for _ in range(4):
        run.feed({
            "gradient/norm": {"a.weight": norm}, "monitor/update_ratio_median": 1e-6, "gradient/global_norm": norm,
            "train/loss": 2.0,
        })  # fmt: skip
    return run.ledger.alerts


def test_the_gradient_is_compared_by_its_root_mean_square():
    (alert,) = fed("U112", norm=1.0, epsilon=0.2)  # 10,000 values: 0.01 each, a twentieth of epsilon
    assert (alert.finding.value, alert.finding.evidence["epsilon"]) == (dataclasses.replace(alert.finding).value, 0.2)
    assert abs(alert.finding.value - 0.01) < 1e-6
    assert fed("U112", norm=10.0, epsilon=0.2) == ()


def test_small_gradients_are_not_the_fault_of_the_default_epsilon():
    assert fed("U112", norm=1e-9, epsilon=1e-8) == ()


def test_a_large_epsilon_is_common_in_reinforcement_learning():
    (alert,) = fed("U112", norm=0.1, epsilon=0.02, objective="return")
    assert alert.severity is Severity.INFO
    (alert,) = fed("U112", norm=1.0, epsilon=0.2, objective="return")  # but not this one
    assert alert.severity is Severity.WARNING


def test_bfloat16_has_the_range_for_it():
    assert fed("U113", 1.0, 1e-8, "float16")
    assert fed("U113", 1.0, 1e-8, "bfloat16") == ()
    assert fed("U113", 1.0, 1e-6, "float16") == ()


def test_an_epsilon_of_zero_needs_no_half_precision():
    (alert,) = fed("U113", 1.0, 0.0)
    assert [remedy.parameters["to"] for remedy in alert.remedies] == [1e-8]


def epsilon_of_one(run):
    return Breakable(run, eps=1.0).train(60)


def weights_in_float16(run):
    it = Breakable(run)
    it.model.half()
    it.change_batch = lambda step, inputs: inputs.half()
    return it.train(60)


FAULTS = {"U112": epsilon_of_one, "U113": weights_in_float16}

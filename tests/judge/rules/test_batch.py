"""The batches: their scale, their order, and whether there is more than one."""

import contextlib
import itertools
import math

import pytest
import torch

import forewarn
from forewarn.lab.data import classification
from forewarn.lab.networks import MLP
from forewarn.measure.post_mortem import variables_with_nan
from forewarn.types import ParameterInfo, RunInfo, Severity
from tests.judge.rules.runs import Run
from tests.real_runs import Breakable, loss_of


def classes_fed(batches, size=32):
    run = Run("D102")
    for batch in batches:
        ordered = sorted(batch)
        run.feed({
            "batch/num_targets": size, "batch/num_classes": len(set(batch)),
            "batch/middle_class": ordered[len(ordered) // 2],
        })  # fmt: skip
    return run.ledger.alerts


def test_batches_of_one_class_each_are_sorted():
    assert classes_fed([[0]] * 4 + [[0, 1]] + [[1]] * 3 + [[2]] * 3)


@pytest.mark.parametrize(
    "batches",
    [[[0, 1, 2, 3]] * 12, [[0]] * 12, [[0]] * 6 + [[0, 0, 0, 1]] * 6],
    ids=["mixed", "one class in all", "a rare second class"],
)
def test_mixed_or_one_sided_data_is_not_sorted(batches):
    assert classes_fed(batches) == ()


def test_small_batches_hold_few_classes_by_chance():
    assert classes_fed([[0], [2], [1], [3]] * 3, size=4) == ()


def test_a_normalization_after_the_first_layer_makes_inputs_not_normalized_harmless():
    kinds = {"a.weight": "Linear.weight", "b.weight": "BatchNorm1d.weight"}
    parameters = {name: ParameterInfo((8, 8), kind, "float32", 0, True) for name, kind in kinds.items()}
    run = Run("D101", info=RunInfo(parameters=parameters))
    for _ in range(3):
        run.feed({"batch/input_rms": {"a": 140.0}})
    assert [alert.severity for alert in run.ledger.alerts] == [Severity.INFO]


def test_inputs_so_large_that_no_loss_is_finite_are_the_cause():
    run = Run("D101", "L101", "G101")
    for _ in range(4):
        run.feed({"batch/input_rms": {"a": 600.0}, "train/loss": math.nan, "gradient/global_norm": math.nan})
    assert [alert.code for alert in run.ledger.firing] == ["D101", "L101", "G101"]


def test_one_batch_for_all_steps_of_an_epoch_is_a_warning():
    run = Run("D103")
    for step in range(30):
        epoch = {"evaluation/epoch": step // 10} if step % 10 == 9 else {}
        run.feed({"train/loss": 1.0, "batch/repeated": 1.0, **epoch})
    assert run.loud()


def test_the_classes_can_be_given_to_the_monitor(tmp_path):
    torch.manual_seed(0)
    model = MLP([16, 32, 5])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = classification(400, 16, 5, seed=0)
    with forewarn.watch(model, optimizer, tmp_path / "run", every=1, views=[]) as monitor:
        for _ in range(12):
            which = torch.randint(400, (32,))
            optimizer.zero_grad()
            loss_of(model, inputs[which], targets[which]).backward()
            optimizer.step()
            monitor.batch(inputs[which], torch.zeros(7, dtype=torch.int64))
            monitor.step(1.0)
    assert monitor.history.series("batch/num_targets").values.tolist() == [7] * 12
    assert monitor.history.series("batch/num_classes").values.tolist() == [1] * 12


def images_from_0_to_255(run):
    it = Breakable(run)
    it.change_batch = lambda step, inputs: 60 * inputs + 128
    return it.train(120)


def classes_in_order(run):
    it = Breakable(run)
    inputs, targets = classification(2000, 16, 5, seed=0)
    order = targets.argsort()
    it.batches = ((inputs[part], targets[part]) for part in itertools.cycle(order.split(32)))
    return it.train(160)


def one_batch_again_and_again(run):
    it = Breakable(run)
    it.batches = itertools.repeat(next(it.batches))
    return it.train(100)


def a_distribution_that_refuses_nan(run):
    it = Breakable(run)
    with contextlib.suppress(ValueError), forewarn.watch(it.model, it.optimizer, run, every=10) as monitor:
        for step in range(40):
            inputs = torch.randn(8, 16)
            if step == 33:
                inputs[3, 5] = float("nan")
            outputs = it.model(inputs)
            loss = -torch.distributions.Normal(outputs, 1.0, validate_args=True).log_prob(inputs[:, :5]).mean()
            loss.backward()
            it.optimizer.step()
            it.optimizer.zero_grad()
            monitor.step(loss)
    return monitor


def test_a_loop_that_fails_on_nan_names_the_step_that_failed(tmp_path):
    (alert,) = [alert for alert in a_distribution_that_refuses_nan(tmp_path / "run").alerts if alert.code == "D104"]
    assert (alert.fired, alert.scope) == (33, "inputs")


def test_the_variables_that_held_nan_when_a_loop_failed_are_counted_in_order():
    def inner(values):
        doubled = 2 * values
        raise ValueError(doubled.shape)

    def outer():
        mask = torch.full((3,), -math.inf)
        batch = torch.tensor([1.0, math.nan, math.nan])
        inner(batch + mask[:1].exp())

    with pytest.raises(ValueError, match="3") as caught:
        outer()
    assert list(variables_with_nan(caught.tb).items()) == [("batch", 2), ("values", 2), ("doubled", 2)]


FAULTS = {
    "D101": images_from_0_to_255, "D102": classes_in_order, "D103": one_batch_again_and_again,
    "D104": a_distribution_that_refuses_nan,
}  # fmt: skip

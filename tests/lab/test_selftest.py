"""The self-test sees what it is made to see: it is tried on monitors and backends that break a promise."""

import pytest
import torch

from forewarn.lab import selftest
from forewarn.measure.engine import portable


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for name in ("SAME_STEPS", "COUNTED_STEPS", "TIMED_STEPS", "WARM_UP_STEPS"):
        monkeypatch.setattr(selftest, name, 2)


@pytest.fixture
def watches(tmp_path):
    return selftest.Watches(tmp_path)


def breaking(watches, fault):
    """Monitors whose steps do something that they must not."""

    def make(every):
        def watch(model, optimizer):
            monitor = watches(every)(model, optimizer)
            honest = monitor.step
            monitor.step = lambda loss: (honest(loss), fault(model, loss))
            return monitor

        return watch

    return make


def test_everything_passes_here(tmp_path):
    results = list(selftest.run_checks("cpu", tmp_path))
    assert [result for result in results if result.passed is False] == []
    judged = {(result.check, result.subject) for result in results if result.passed}
    models = set(selftest.MODELS)
    assert judged >= {("same bits", model) for model in models} | {("no waiting", model) for model in models}
    assert ("right numbers", "portable") in judged
    costs = [result.figures["bare_seconds"] for result in results if result.check == "cost"]
    assert len(costs) == len(models)
    assert min(costs) > 0


def change_a_weight(model, loss):
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-6


@pytest.mark.parametrize("fault", [change_a_weight, lambda model, loss: torch.rand(1)])
def test_a_monitor_that_changes_the_training_fails(fault, watches):
    result = selftest.same_bits("perceptron", "cpu", breaking(watches, fault))
    assert result.passed is False
    assert "DIFFER" in result.words


def test_a_device_that_trains_otherwise_each_time_is_not_judged(watches, monkeypatch):
    bits = iter([[b"1"], [b"2"], [b"1"]])
    monkeypatch.setattr(selftest.Training, "bits", lambda self: next(bits))
    assert selftest.same_bits("perceptron", "cpu", watches).passed is None


def test_a_monitor_that_waits_for_the_device_fails(watches):
    result = selftest.no_waiting("perceptron", "cpu", breaking(watches, lambda model, loss: loss.item()))
    assert result.passed is False
    assert result.figures == {"light": 2, "measured": 2}


@pytest.mark.parametrize("column", range(7))
def test_a_backend_with_a_wrong_column_fails(column):
    def wrong(tensors):
        rows = portable.measure(tensors)[0].numpy()
        rows[3, column] *= 1 + 1e-9
        rows[3, column] += 1e-9
        return rows

    assert selftest.right_numbers("mine", "", lambda tensors: portable.measure(tensors)[0], "cpu").passed
    assert selftest.right_numbers("mine", "", wrong, "cpu").passed is False


def test_a_backend_that_is_missing_says_why():
    result = selftest.right_numbers("triton", "triton is not installed", list, "cpu")
    assert (result.passed, result.words) == (None, "not available: triton is not installed")

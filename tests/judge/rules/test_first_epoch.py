"""Rules about the first epochs: a loss that has not moved, or that has risen above its start."""

import numpy as np
import pytest

from forewarn.types import Severity
from tests.judge.rules.runs import Run


def first_epoch(start, end, peak, lr=1e-3, steps=300):
    run = Run("E106", "E107")
    for step, rate in enumerate(np.broadcast_to(lr, steps)):
        ended = {"evaluation/start_loss": start, "evaluation/end_loss": end, "evaluation/peak_loss": peak}
        run.feed({"train/lr": {"0": rate}, **(ended if step == steps - 1 else {})})
    return run


def test_a_first_epoch_that_moves_nothing_wants_a_higher_lr():
    (alert,) = first_epoch(4.6, 4.58, 4.62).ledger.firing
    assert alert.code == "E106"
    assert str(alert.remedies[0]) == "raise_lr 0.001 → 0.01"


def test_a_first_epoch_that_spikes_wants_a_lower_one():
    (alert,) = first_epoch(4.6, 5.0, 9.0).ledger.firing
    assert (alert.code, alert.severity) == ("E107", Severity.WARNING)
    assert str(alert.remedies[0]) == "lower_lr 0.001 → 0.0001"
    assert first_epoch(4.6, 20.0, 20.0).ledger.firing[0].severity is Severity.CRITICAL
    assert first_epoch(4.6, 3.0, 9.0).ledger.firing[0].severity is Severity.INFO


@pytest.mark.parametrize(
    "epoch", [{"end": 4.2, "peak": 4.6}, {"end": 4.58, "peak": 4.6, "lr": np.linspace(0, 1e-3, 300)},
              {"end": 4.58, "peak": 4.6, "steps": 100}], ids=["it moved", "the lr still rises", "too few steps"],
)  # fmt: skip
def test_nothing_is_said_of_a_first_epoch_where(epoch):
    assert first_epoch(4.6, **epoch).ledger.alerts == ()

"""Rules about the monitor itself."""

from pathlib import Path

import pytest
import torch

import forewarn
from forewarn.types import AlertState, Reason, Severity
from tests.judge.rules.runs import Run


def test_each_failed_probe_stays_named():
    run = Run("X101")
    run.feed({"monitor/probe_failed": {"weights": 1.0}})
    for _ in range(100):
        run.feed({"train/loss": 2.0})
    run.feed({"monitor/probe_failed": {"speed": 1.0}})
    assert {alert.scope for alert in run.ledger.firing} == {"weights", "speed"}
    assert {str(alert.remedies[0]) for alert in run.ledger.firing} == {
        "report_bug probe weights step 0", "report_bug probe speed step 101",
    }  # fmt: skip


NO_CONCERN = (Reason.STEP_SKIPPED, Reason.ONE_BATCH, Reason.RANK_GRADIENT_UNSEEN)


@pytest.mark.parametrize("reason", [r for r in Reason if r not in (Reason.AVAILABLE, *NO_CONCERN)])
def test_a_reading_that_cannot_be_taken_says_why(reason):
    run = Run("X103")
    run.feed({"monitor/unavailable": {"gradient/global_norm": reason}})
    (alert,) = run.ledger.firing
    assert (alert.scope, alert.severity) == ("gradient/global_norm", Severity.INFO)
    assert alert.finding.evidence["reason"] == str(reason)


def test_it_is_taken_back_when_the_reading_is_there_again():
    run = Run("X103")
    run.feed({"monitor/unavailable": {"gradient/global_norm": Reason.COMPILED}})
    (alert,) = run.feed({"monitor/unavailable": {"gradient/global_norm": Reason.AVAILABLE}}, step=200)
    assert alert.state is AlertState.RESOLVED


@pytest.mark.parametrize("reason", NO_CONCERN)
def test_steps_that_a_scaler_skips_and_a_noise_scale_that_can_not_be_had_are_not_reported(reason):
    run = Run("X103")
    run.feed({"monitor/unavailable": {"gradient/noise_scale": reason}})
    assert run.ledger.alerts == ()


def test_a_store_that_failed_is_a_warning_that_stays():
    run = Run("X104")
    run.feed({"monitor/store_failed": 1.0})
    for _ in range(200):
        run.feed({"train/loss": 2.0})
    assert run.ledger.firing[0].severity is Severity.WARNING


@pytest.mark.parametrize(
    ("reason", "action"),
    [
        (Reason.SCALED_GRADIENTS, "pass_the_scaler"), (Reason.NO_FORWARD_SEEN, "watch_what_is_called"),
        (Reason.EVALUATION_MODE, "call_train"), (Reason.SHARDED_PARAMETERS, "do_without"),
    ],
)  # fmt: skip
def test_the_advice_follows_the_reason_why_a_metric_is_unavailable(reason, action):
    run = Run("X103")
    run.feed({"monitor/unavailable": {"gradient/global_norm": float(reason)}})
    (alert,) = run.ledger.firing
    assert [remedy.action for remedy in alert.remedies] == [action]


def over_budget(path: Path) -> forewarn.Monitor:
    """Any detail takes more than a billionth of the time."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with forewarn.watch(model, optimizer, path, every=10, views=[], budget=1e-9) as monitor:
        for _ in range(510):
            loss = model(torch.randn(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    return monitor


def without_snapshots(path: Path) -> forewarn.Monitor:
    """A file is where the folder of snapshots should be."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with forewarn.watch(model, optimizer, path, views=[]) as monitor:
        (path / "snapshots").write_text("in the way")
        for step in range(20):
            loss = model(torch.randn(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
            if step == 9:
                monitor.snapshot()
    return monitor


FAULTS = {"X106": over_budget, "X108": without_snapshots}

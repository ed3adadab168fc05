"""A run that forewarn wrote to TensorBoard is judged from there as it was judged live."""

import re

import pytest

import forewarn
from forewarn.config import Config
from forewarn.importing import find_logs, import_log
from forewarn.judge.diagnosis import replay
from forewarn.judge.rules import all_rules
from forewarn.store import open_run
from tests.learning_runs import LEARNING_FAULTS
from tests.real_runs import FAULTS, healthy

RUNS = {**FAULTS, **LEARNING_FAULTS}
FEW = ("L102", "U104", "W103", "E101")
NAN = {"L101", "G101", "W101", "M101"}
"""Rules about values that are NaN, which the view does not write."""
NOT_IN_A_TAG = re.compile(r"[^\w.\-]")


def alerts_of(run, lost):
    """Code, place, severity, state and steps of every alert whose rule has lost none of its series."""
    survive = {rule.code for rule in all_rules() if not lost & set(rule.when)} - NAN
    alerts = replay(run, Config.from_stored(run.config).rule_set()).alerts
    return {
        (
            alert.code,
            NOT_IN_A_TAG.sub("_", alert.scope),
            alert.severity,
            alert.state,
            alert.since,
            alert.fired,
            alert.last,
        )
        for alert in alerts
        if alert.code in survive
    }


def check_round_trip(train, folder, monkeypatch):
    watch = forewarn.watch

    def with_tensorboard(*arguments, **settings):
        view = forewarn.TensorBoardView(folder / "tb", detail="full")
        return watch(*arguments, **{**settings, "views": [view]})

    monkeypatch.setattr(forewarn, "watch", with_tensorboard)
    train(folder / "run")
    if not (folder / "tb").exists():
        pytest.skip("this run chooses its own views")
    (log,) = find_logs(folder / "tb")
    import_log(log.read(), folder / "imported")
    with open_run(folder / "run") as live, open_run(folder / "imported") as imported:
        lost = set(live.names()) - set(imported.names())
        assert set(imported.names()) <= set(live.names())
        assert imported.info.parameters == live.info.parameters
        expected = alerts_of(live, lost)
        assert alerts_of(imported, lost) == expected
        return expected


@pytest.mark.parametrize("code", FEW)
def test_a_fault_raises_the_same_alerts_from_tensorboard(code, tmp_path, monkeypatch):
    assert code in {alert[0] for alert in check_round_trip(RUNS[code], tmp_path, monkeypatch)}


@pytest.mark.ci
@pytest.mark.parametrize("code", sorted(set(RUNS) - set(FEW)))
def test_every_fault_raises_the_same_alerts_from_tensorboard(code, tmp_path, monkeypatch):
    check_round_trip(RUNS[code], tmp_path, monkeypatch)


def test_a_healthy_run_stays_healthy_on_the_way_through_tensorboard(tmp_path, monkeypatch):
    check_round_trip(lambda run: healthy("mlp", 0, run), tmp_path, monkeypatch)

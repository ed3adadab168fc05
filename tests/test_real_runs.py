"""Every rule on real training: its own fault is named first, healthy runs are left in peace."""

from importlib import import_module
from pathlib import Path

import pytest

import forewarn
from forewarn.config import Config
from forewarn.judge.diagnosis import replay
from forewarn.judge.families import Family
from forewarn.judge.rules import all_rules, family_of
from forewarn.types import Severity
from tests.learning_runs import LEARNING_FAULTS, healthy_epochs
from tests.metric_runs import METRIC_FAULTS, healthy_with_metrics
from tests.real_runs import FAULTS, KINDS, TWINS, dual_task_lstm, healthy

RULE_TESTS = [path.stem for path in sorted((Path(__file__).parent / "judge" / "rules").glob("test_*.py"))]
EVERY_FAULT = {**FAULTS, **LEARNING_FAULTS, **METRIC_FAULTS}
for stem in RULE_TESTS:  # the tests of a rule may bring its fault along
    EVERY_FAULT |= getattr(import_module(f"tests.judge.rules.{stem}"), "FAULTS", {})


def described(monitor: forewarn.Monitor) -> list[str]:
    ranked = monitor._ledger.ranked(monitor.alerts)
    return [f"{a.code} {a.name} {a.scope} {a.severity} since {a.since} {dict(a.finding.evidence)}" for a in ranked]


def warnings_of(monitor: forewarn.Monitor) -> list[str]:
    loud = [alert for alert in monitor.alerts if alert.severity >= Severity.WARNING]
    return [f"{a.code} {a.scope} {a.finding}" for a in loud]


@pytest.fixture
def noise_of(capsys):
    """The warnings of a run, and whatever it printed besides one line at each start and one at each end."""

    def noise(monitor: forewarn.Monitor) -> list[str]:
        lines = capsys.readouterr().err.splitlines()
        kinds = ["start" if line.startswith("forewarn  ") else "end" for line in lines]
        assert lines
        assert kinds == ["start", "end"] * (len(lines) // 2), lines
        return warnings_of(monitor) + [line for line in lines[1::2] if not line.startswith("✓ forewarn  ")]

    return noise


@pytest.mark.parametrize("code", EVERY_FAULT)
def test_a_fault_is_named_first_and_is_judged_the_same_again(code, tmp_path):
    monitor = EVERY_FAULT[code](tmp_path / "run")
    assert monitor.alerts, "nothing fired"
    ranked = monitor._ledger.ranked(monitor.alerts)
    assert ranked[0].code == code, "\n".join(described(monitor))
    assert ranked[0].remedies
    with forewarn.open_run(tmp_path / "run") as run:
        assert repr(replay(run, Config.from_stored(run.config).rule_set()).alerts) == repr(monitor.alerts)


def test_every_rule_has_a_fault_or_a_test_of_its_own():
    of_several_processes = {"R101", "R102", "R103", "R104", "X105"}  # tests/test_rank_faults.py, test_exchange.py
    elsewhere = {"M104", "X102", "X104", "X107", "X109"} | of_several_processes
    assert {rule.code for rule in all_rules()} - set(EVERY_FAULT) == elsewhere


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_run_prints_how_it_starts_and_ends_and_nothing_else(kind, tmp_path, noise_of):
    assert noise_of(healthy(kind, 0, tmp_path / "run")) == []


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_said_of_metrics_of_ones_own_in_a_healthy_run(kind, tmp_path):
    monitor = healthy_with_metrics(kind, 0, tmp_path / "run")
    assert len(monitor.history.panel("activation_metric/kurtosis")) >= 60
    assert [alert for alert in monitor.alerts if family_of(alert.code) is Family.METRICS] == []
    assert warnings_of(monitor) == []


@pytest.mark.parametrize("twin", TWINS)
def test_a_healthy_run_that_looks_faulty_at_first_sight_prints_how_it_starts_and_ends_and_nothing_else(
    twin, tmp_path, noise_of
):
    assert noise_of(TWINS[twin](tmp_path / "run")) == []


def test_a_sparse_layer_is_not_a_dead_one(tmp_path):
    monitor = TWINS["sparse_units"](tmp_path / "run")
    zeros = monitor.history.series("activation/zero_fraction", "layers.3").values
    assert len(zeros) > 40
    assert zeros.max() > 0.8
    assert zeros.min() > 0.5
    assert (monitor.history.panel("activation/dead_fraction").last < 0.3).all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_healthy_seeds_print_how_they_start_and_end_and_nothing_else(kind, seed, tmp_path, noise_of):
    assert noise_of(healthy(kind, seed, tmp_path / "run")) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
@pytest.mark.parametrize("kind", KINDS)
def test_ten_healthy_seeds_say_nothing_of_metrics_of_ones_own(kind, seed, tmp_path):
    monitor = healthy_with_metrics(kind, seed, tmp_path / "run")
    assert [alert for alert in monitor.alerts if family_of(alert.code) is Family.METRICS] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_run_of_several_epochs_prints_how_it_starts_and_ends_and_nothing_else(kind, tmp_path, noise_of):
    assert noise_of(healthy_epochs(kind, 0, tmp_path / "run")) == []


def check_two_healthy_tasks(seed, folder):
    model = dual_task_lstm(seed, folder / "run")
    assert model.epochs[-1].held_out["accuracy"] > 0.8
    assert model.epochs[-1].held_out["pointer"] < 0.1
    assert warnings_of(model.monitor) == []
    with forewarn.open_run(folder / "run") as run:
        assert repr(replay(run, Config.from_stored(run.config).rule_set()).alerts) == repr(model.monitor.alerts)


def test_two_tasks_that_get_on_raise_no_warning_and_are_judged_the_same_again(tmp_path):
    check_two_healthy_tasks(0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 31))
@pytest.mark.parametrize("kind", KINDS)
def test_thirty_healthy_seeds_of_several_epochs_print_how_they_start_and_end_and_nothing_else(
    kind, seed, tmp_path, noise_of
):
    assert noise_of(healthy_epochs(kind, seed, tmp_path / "run")) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_long_healthy_runs_print_how_they_start_and_end_and_nothing_else(kind, seed, tmp_path, noise_of):
    assert noise_of(healthy_epochs(kind, seed, tmp_path / "run", epochs=6, steps=300)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 31))
def test_thirty_seeds_of_two_tasks_that_get_on_raise_no_warning(seed, tmp_path):
    check_two_healthy_tasks(seed, tmp_path)

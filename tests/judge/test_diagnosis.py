"""A stored run judged again."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from forewarn.config import Config, Thresholds
from forewarn.judge import judgement
from forewarn.judge.diagnosis import Diagnosis, replay
from forewarn.judge.history import History
from forewarn.judge.judgement import Judge
from forewarn.judge.ledger import Ledger
from forewarn.judge.rules.loss import LossSpike
from forewarn.standing import NOT_FALLING
from forewarn.store import RunWriter, open_run
from forewarn.types import Alert, AlertState, Block, Finding, RunInfo, Severity

FACTS = RunInfo(model="Net", blocks=("blocks.0", "blocks.1"))
Readings = dict[str, list[float]]


def write(path: Path, readings: Readings, info: RunInfo = FACTS, config: Config | None = None) -> Path:
    """A run with one value per step for each `name` or `name@scope`."""
    writer = RunWriter(path, info=info, config=(config or Config()).to_dict())
    for step in range(max(map(len, readings.values()))):
        here: dict[str, dict[str, float]] = {}
        for key, values in readings.items():
            name, _, scope = key.partition("@")
            if step < len(values):
                here.setdefault(name, {})[scope] = values[step]
        writer.append(
            step,
            [
                Block(step, 1e9 + step, name, tuple(row), np.array(list(row.values()), np.float32))
                for name, row in here.items()
            ],
        )
    writer.close("completed")
    return path


@pytest.fixture
def diagnosed(tmp_path: Path) -> Callable[..., Diagnosis]:
    """The diagnosis of a run with these readings."""

    def diagnose(readings: Readings, info: RunInfo = FACTS, config: Config | None = None) -> Diagnosis:
        with open_run(write(tmp_path / "run", readings, info)) as run:
            return replay(run, (config or Config.from_stored(run.config)).rule_set())

    return diagnose


def state_of(diagnosis: Diagnosis, name: str) -> str:
    return next(check.state for check in diagnosis.checklist if check.name == name)


def detail_of(diagnosis: Diagnosis, name: str) -> str:
    return next(check.detail for check in diagnosis.checklist if check.name == name)


def falling(steps: int = 200) -> list[float]:
    return list(2 + 3 * np.exp(-np.arange(steps) / 50) + np.random.default_rng(0).normal(0, 0.01, steps))


def alert(severity: Severity, state: AlertState) -> Alert:
    finding = Finding("L102", "", 5, severity, 9.0, 2.0)
    return Alert("L102", "loss-spike", "", severity, state, since=5, fired=5, last=9, finding=finding)


@pytest.mark.parametrize(
    ("alerts", "code"),
    [
        ([], 0),
        ([(Severity.INFO, AlertState.FIRING)], 0),
        ([(Severity.WARNING, AlertState.FIRING)], 1),
        ([(Severity.CRITICAL, AlertState.FIRING)], 2),
        ([(Severity.INFO, AlertState.RESOLVED)], 0),
        ([(Severity.WARNING, AlertState.RESOLVED)], 0),
        ([(Severity.CRITICAL, AlertState.RESOLVED)], 1),
        ([(Severity.CRITICAL, AlertState.RESOLVED), (Severity.WARNING, AlertState.FIRING)], 1),
        ([(Severity.CRITICAL, AlertState.RESOLVED), (Severity.CRITICAL, AlertState.FIRING)], 2),
    ],
)
def test_the_exit_code_counts_what_fires_and_a_resolved_alert_one_level_lower(
    alerts: list[tuple[Severity, AlertState]], code: int
) -> None:
    made = tuple(alert(severity, state) for severity, state in alerts)
    assert Diagnosis(made, made, {}, (), 9, None).exit_code == code


def test_a_replay_gives_the_alerts_of_the_live_run_field_by_field(tmp_path: Path) -> None:
    losses = [*falling(), *[500.0] * 30, *falling()[100:], 9000.0]
    rule_set = Config().rule_set()
    history, judge, ledger = History(), Judge(rule_set, FACTS), Ledger(rule_set.rules)
    for step, loss in enumerate(losses):
        blocks = [Block(step, 1e9 + step, "train/loss", ("",), np.array([loss], np.float32))]
        history.append(blocks)
        ledger.update(judge(step, history, blocks), history, FACTS)
    with open_run(write(tmp_path / "run", {"train/loss": losses})) as run:
        diagnosis = replay(run, Config.from_stored(run.config).rule_set())
    assert diagnosis.alerts == ledger.alerts
    assert len(diagnosis.alerts) >= 2
    assert sorted(map(id, diagnosis.ranked)) == sorted(map(id, diagnosis.alerts))
    assert diagnosis.ranked[0].state is AlertState.FIRING
    assert diagnosis.last_step == len(losses) - 1
    assert diagnosis.end is not None
    assert diagnosis.end[0] == "completed"


def test_a_replay_looks_back_as_far_as_the_monitor_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[History] = []
    monkeypatch.setattr(judgement, "History", lambda *given: made.append(History(*given)) or made[-1])
    with open_run(write(tmp_path / "run", {"monitor/grad_median": [1.0] * 200, "train/loss": [1.0] * 200})) as run:
        replay(run, Config.from_stored(run.config).rule_set())
    [history] = made
    assert len(history.series("train/loss")) == 200
    assert len(history.series("monitor/grad_median")) == Config().detail_window, "no rule looks at it"


def test_a_run_is_judged_by_its_own_config_unless_another_is_given(tmp_path: Path) -> None:
    off = Config(disable=("loss-spike",))
    path = write(tmp_path / "run", {"train/loss": [*falling(), 400.0]}, config=off)
    with open_run(path) as run:
        assert "L102" not in {one.code for one in replay(run, Config.from_stored(run.config).rule_set()).alerts}
        assert "L102" in {one.code for one in replay(run, Config().rule_set()).alerts}
        lax = Config(thresholds=Thresholds(loss_spike=LossSpike(floor=math.log(1e6), ceiling=math.log(1e6))))
        assert "L102" not in {one.code for one in replay(run, lax.rule_set()).alerts}


def test_settings_of_another_version_are_left_out(tmp_path: Path) -> None:
    config = Config(disable=("loss-spike",), hyperparameters={"dropout": 0.1}).to_dict()
    config["thresholds"]["loss_spike"]["of_the_future"] = config["of_the_past"] = 1
    writer = RunWriter(tmp_path / "run", info=FACTS, config=config)
    for step, loss in enumerate([*falling(), 400.0]):
        writer.append(step, [Block(step, 1e9, "train/loss", ("",), np.array([loss], np.float32))])
    writer.close()
    with open_run(tmp_path / "run") as run:
        assert "L102" not in {one.code for one in replay(run, Config.from_stored(run.config).rule_set()).alerts}


def test_symptoms_name_their_cause(diagnosed: Callable[..., Diagnosis]) -> None:
    diagnosis = diagnosed({"train/loss": [*falling(), *[400.0] * 40]})
    ledger = Ledger(Config().rule_set().rules)
    for one in diagnosis.alerts:
        assert diagnosis.cause_of(one) == ledger.causes(diagnosis.alerts).get((one.code, one.since))


def test_a_run_without_a_step_is_not_called_healthy(diagnosed: Callable[..., Diagnosis]) -> None:
    assert diagnosed({"train/loss": []}, RunInfo()).verdict == "too early to tell"


def test_an_empty_run_is_healthy_and_knows_nothing(diagnosed: Callable[..., Diagnosis]) -> None:
    diagnosis = diagnosed({"train/loss": []} | {"train/clip": [1.0]}, RunInfo())
    assert diagnosis.exit_code == 0
    assert [check.state for check in diagnosis.checklist] == ["unknown"] * 6 + ["pass"]


@pytest.mark.parametrize(
    ("losses", "state"),
    [
        (falling(), "pass"),
        (falling()[::-1], "fail"),
        ([3.0] * 100, "notice"),
        ([*falling(), *[4.5] * 60], "fail"),
        ([*falling(), math.nan], "fail"),
        ([-1.0 - 0.01 * step for step in range(100)], "pass"),
        (falling(19), "unknown"),
        ([math.nan] * 30 + falling(), "pass"),
    ],
)
def test_the_loss_falls_if_it_kept_its_fall(
    diagnosed: Callable[..., Diagnosis], losses: list[float], state: str
) -> None:
    assert state_of(diagnosed({"train/loss": losses}), "loss falling") == state


@pytest.mark.parametrize(("separate", "verdict"), [([], NOT_FALLING), ([1.0] * 100, "healthy")])
def test_a_game_whose_loss_does_not_fall_is_healthy(
    diagnosed: Callable[..., Diagnosis], separate: list[float], verdict: str
) -> None:
    diagnosis = diagnosed({"train/loss": [3.0] * 100, "update/separate_losses": separate})
    assert diagnosis.verdict == verdict
    assert detail_of(diagnosis, "loss falling").endswith("not what this run improves") == (verdict == "healthy")


def test_the_detail_of_a_falling_loss_is_its_first_and_last_level(diagnosed: Callable[..., Diagnosis]) -> None:
    losses = [5.0] * 20 + [3.0] * 160 + [2.0] * 20
    assert detail_of(diagnosed({"train/loss": losses}), "loss falling") == "5 → 2"


@pytest.mark.parametrize(
    ("norms", "state"),
    [
        ([1.0] * 50, "pass"),
        ([1e5] * 50, "fail"),
        ([1e-5] * 50, "fail"),
        ([1.0] * 49 + [math.inf], "fail"),
        ([], "unknown"),
    ],
)
def test_gradient_norms_are_in_range_lately(
    diagnosed: Callable[..., Diagnosis], norms: list[float], state: str
) -> None:
    diagnosis = diagnosed({"gradient/global_norm": norms, "train/clip": [1.0]})
    assert state_of(diagnosis, "gradient norms in range") == state


@pytest.mark.parametrize(("ratio", "state"), [(1e-3, "pass"), (0.5, "fail"), (1e-9, "notice")])
def test_update_ratios_are_in_range_lately(diagnosed: Callable[..., Diagnosis], ratio: float, state: str) -> None:
    assert state_of(diagnosed({"monitor/update_ratio_median": [ratio] * 5}), "update ratios in range") == state


def test_lately_is_the_second_half_of_the_run_and_not_its_dense_start(tmp_path: Path) -> None:
    """Each of the first ten steps and then every hundredth are measured."""
    writer = RunWriter(tmp_path / "run", info=FACTS, config=Config().to_dict())
    for step in range(120):
        ratio = 0.9 if step < 10 else 1e-3
        measured = step < 10 or step == 100
        blocks = [Block(step, 1e9 + step, "train/loss", ("",), np.array([1.0], np.float32))]
        if measured:
            blocks.append(Block(step, 1e9 + step, "monitor/update_ratio_median", ("",), np.array([ratio], np.float32)))
        writer.append(step, blocks)
    writer.close("completed")
    with open_run(tmp_path / "run") as run:
        diagnosis = replay(run, Config.from_stored(run.config).rule_set())
    assert detail_of(diagnosis, "update ratios in range").startswith("lately 0.001,")


def test_where_only_the_first_half_was_measured_its_last_reading_counts(diagnosed: Callable[..., Diagnosis]) -> None:
    ratios = [0.9] * 9 + [1e-3]
    diagnosis = diagnosed({"train/loss": falling(), "monitor/update_ratio_median": ratios})
    assert detail_of(diagnosis, "update ratios in range").startswith("lately 0.001,")


@pytest.mark.parametrize(("first", "state"), [(1.0, "pass"), (99.0, "pass"), (101.0, "notice"), (0.0099, "notice")])
def test_first_and_last_block_have_gradients_within_a_hundred_times(
    diagnosed: Callable[..., Diagnosis], first: float, state: str
) -> None:
    norms = {
        "gradient/norm@blocks.0.a": [0.6 * first] * 5,
        "gradient/norm@blocks.0.b": [0.8 * first] * 5,
        "gradient/norm@blocks.1.a": [1.0] * 5,
        "gradient/norm@blocks.10.a": [1e9] * 5,
    }
    assert state_of(diagnosed(norms), "gradients even over depth") == state


def test_without_blocks_nothing_is_known_about_depth(diagnosed: Callable[..., Diagnosis]) -> None:
    assert state_of(diagnosed({"gradient/norm@weight": [1.0] * 5}, RunInfo()), "gradients even over depth") == "unknown"


@pytest.mark.parametrize(
    ("name", "check", "growth", "state"),
    [
        ("speed/step_seconds", "throughput stable", 1.4, "pass"),
        ("speed/step_seconds", "throughput stable", 1.6, "notice"),
        ("speed/step_seconds", "throughput stable", 0.5, "pass"),
        ("system/process_memory_bytes", "memory stable", 1.1, "pass"),
        ("system/process_memory_bytes", "memory stable", 1.3, "notice"),
    ],
)
def test_the_second_half_is_compared_with_the_first(
    diagnosed: Callable[..., Diagnosis], name: str, check: str, growth: float, state: str
) -> None:
    assert state_of(diagnosed({name: [2.0] * 20 + [2.0 * growth] * 20}), check) == state


def test_information_is_no_reason_against_a_healthy_run(diagnosed: Callable[..., Diagnosis]) -> None:
    diagnosis = diagnosed({"train/loss": [*falling(), 3.5, 2.0, 2.0]})
    assert [one.severity for one in diagnosis.alerts] == [Severity.INFO]
    assert state_of(diagnosis, "no open warnings") == "pass"
    assert detail_of(diagnosis, "no open warnings") == "1 note open"
    assert diagnosis.exit_code == 0


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"micro_batch_size": 16}, "noise scale 510 examples: batches up to about that size .* yours is 64"),
        ({"batch_size": 64}, "noise scale 510 examples: .* yours is 64"),
        ({"batch_size": True}, "noise scale 32 micro-batches: .* yours is 4"),
        ({}, "noise scale 32 micro-batches: .* yours is 4"),
    ],
)
def test_the_batch_size_that_the_gradient_noise_suggests_is_information(diagnosed, declared, words):
    readings = {"gradient/noise_scale": [90.0, 32.0], "gradient/backward_passes": [4.0] * 3}
    diagnosis = diagnosed(readings, RunInfo(hyperparameters=declared))
    assert state_of(diagnosis, "batch size") == "info"
    assert re.search(words, detail_of(diagnosis, "batch size"))
    assert diagnosis.exit_code == 0


def test_under_ddp_with_one_pass_per_step_it_is_told_in_batches_of_all_ranks(diagnosed):
    readings = {"gradient/noise_scale": [0.5], "gradient/backward_passes": [1.0]}
    assert "scale 0.5 batches of yours: " in detail_of(diagnosed(readings), "batch size")


def test_without_a_noise_scale_no_batch_size_is_suggested(diagnosed):
    diagnosis = diagnosed({"gradient/backward_passes": [1.0] * 3}, RunInfo(hyperparameters={"batch_size": 64}))
    assert "batch size" not in {check.name for check in diagnosis.checklist}

"""Stored steps that are judged many at a time give what each gives by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forewarn.config import Config
from forewarn.judge.history import History
from forewarn.judge.judgement import Judge, RuleSet
from forewarn.judge.ledger import Ledger
from forewarn.judge.registry import NEVER, NOT_FINITE, Outside, Since, finding, rule
from forewarn.judge.remedies import advise
from forewarn.judge.rules import all_rules
from forewarn.judge.series import Baseline, RollingMedian, Series
from forewarn.judge.spike import Spike
from forewarn.judge.stored_steps import judged_steps
from forewarn.judge.upcoming import Column, Upcoming
from forewarn.store import Run, RunWriter, open_run
from forewarn.types import Block, ParameterInfo, RunInfo, Severity

TENSORS = tuple(f"blocks.{index}.weight" for index in range(5))
PHASES = ("data", "forward", "backward", "optimizer", "between passes", "monitor")
INFO = RunInfo(
    model="GPT", parameters=dict.fromkeys(TENSORS, ParameterInfo((16, 16), "Linear.weight", "float32", 0, True)),
    groups=({"lr": 1e-3},), metrics={"gradient_metric/norm": (0.01, 20.0)},
)  # fmt: skip

Rows = Iterator[dict[tuple[str, tuple[str, ...]], Any]]


def one_by_one(run: Run, rule_set: RuleSet) -> Ledger:
    """The ledger as the monitor would have it."""
    history, judge, ledger = rule_set.history(run.info), Judge(rule_set, run.info), Ledger(rule_set.rules)
    for step, blocks in run.steps():
        ledger.update(judge(step, history, history.append(blocks)), history, run.info)
    return ledger


def stored(path: Path, rows: Rows, steps: Callable[[int], int] = int) -> Run:
    writer = RunWriter(path, info=INFO, config=Config().to_dict())
    for number, row in enumerate(rows):
        step = steps(number)
        blocks = [
            Block(step, float(number), name, scopes, np.asarray(values, np.float32).reshape(len(scopes)))
            for (name, scopes), values in row.items()
        ]
        writer.append(step, blocks)
    writer.close()
    return open_run(path)


def light(loss: float, norm: float, lr: float = 1e-3, seconds: float = 0.1) -> dict[tuple[str, tuple[str, ...]], Any]:
    return {
        ("train/lr", ("0",)): [lr], ("update/optimizer_steps", ("",)): [1.0], ("train/loss", ("",)): [loss],
        ("speed/step_seconds", ("",)): [seconds], ("gradient/global_norm", ("",)): [norm],
    }  # fmt: skip


def random_rows(seed: int, num_rows: int = 1500) -> Rows:
    """A run in which anything may happen: spikes, drifts, values that are not finite, metrics that come and go."""
    rng = np.random.default_rng(seed)
    kinds = rng.random(8)
    noise = 10.0 ** rng.uniform(-2.5, -0.3)
    offset = -5.0 if kinds[0] < 0.25 else 0.0
    strange = 0.004 if kinds[1] < 0.6 else 0.0
    drift, lr = 0.0, 1e-3
    seconds = 2.0 if kinds[2] < 0.4 else 0.05
    for row in range(num_rows):
        if rng.random() < 0.003:
            drift = rng.normal() * 0.01
        if rng.random() < 0.004:
            lr *= 10 ** rng.uniform(-4, 1.2)
        lr = min(lr * (1 + 0.001 * (kinds[3] < 0.3)), 10.0)
        loss = 3.0 * np.exp(drift * (row % 300) + noise * rng.normal()) + offset
        norm = np.exp(0.2 * rng.normal()) * (rng.choice([1e-5, 40.0, 5000.0]) if rng.random() < 0.01 else 1.0)
        if rng.random() < strange:
            loss, norm = rng.choice([np.nan, np.inf, -np.inf, 0.0, 100.0]), rng.choice([np.nan, np.inf, 1.0])
        values = light(loss, norm, lr, seconds * np.exp(0.1 * rng.normal()) * (40.0 if rng.random() < 0.003 else 1.0))
        if rng.random() < 0.002:
            del values["train/loss", ("",)]
        if rng.random() < strange:
            values["update/optimizer_steps", ("",)] = [0.0]
        if row % 32 == 31:
            values["train/loss_level", ("",)] = [loss]
        if kinds[4] < 0.5 and (seconds > 1 or row % 10 == 0):
            phases = seconds * rng.dirichlet(np.array([1, 5, 8, 2, 1, 1]) * (3 if row % 700 < 500 else 0.3))
            values["speed/phase_seconds", PHASES] = phases * (8 if drift > 0.01 else 1)
        if kinds[5] < 0.5:
            names = TENSORS if row < 1000 else TENSORS[:4]
            own = np.exp(rng.normal(size=len(names))) * (1000 if rng.random() < 0.003 else 1)
            values["gradient_metric/norm", names] = np.where(rng.random(len(names)) < strange / 4, np.nan, own)
        if kinds[6] < 0.4:
            values["rank/loss", ("rank_0", "rank_1", "rank_2")] = loss * (1 + 0.05 * rng.normal(size=3)) + (
                [0, 0, 2] if 600 < row < 700 else [0, 0, 0]
            )
        if row % 50 == 0 or row < 4:
            for name, scale in (("gradient/norm", 0.1), ("weight/norm", 1.0), ("update/ratio", 1e-3)):
                values[name, TENSORS] = scale * np.exp(0.3 * rng.normal(size=5))
            values["update/stopped_by", TENSORS] = np.zeros(5)
        if row == 800 and kinds[7] < 0.5:
            values["monitor/resumed", ("",)] = [1.0]
        if row % 400 == 399:
            for name in ("evaluation/epoch", "evaluation/train_loss", "eval/loss"):
                values[name, ("",)] = [loss]
        if row == 1200 and kinds[7] > 0.8:
            values["train/lr_plan", ("0",)] = [1e-3]
        yield values


@pytest.mark.parametrize("seed", range(4))
def test_random_runs_give_the_same_alerts_and_the_same_ledger(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def steps(number: int) -> int:  # a gap, and after a rollback a part that comes twice
        return number + (700 if number > 900 and seed % 2 else 0) - (40 if number > 1100 and seed % 3 == 0 else 0)

    rule_set = Config().rule_set()
    caplog.set_level(logging.DEBUG, "forewarn")
    with stored(tmp_path / "run", random_rows(seed), steps) as run:
        together, apart = judged_steps(run, rule_set), one_by_one(run, rule_set)
    assert apart.alerts
    assert repr(together.alerts) == repr(apart.alerts)
    assert repr(together.state_dict()) == repr(apart.state_dict())
    assert "could not look ahead" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 40))
def test_many_random_runs_give_the_same(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    test_random_runs_give_the_same_alerts_and_the_same_ledger(seed, tmp_path, caplog)


def test_a_short_memory_gives_the_same(tmp_path: Path) -> None:
    rule_set = Config(history_window=64, detail_window=16).rule_set()
    with stored(tmp_path / "run", random_rows(1, 1000)) as run:
        together, apart = judged_steps(run, rule_set), one_by_one(run, rule_set)
    assert apart.alerts
    assert repr(together.state_dict()) == repr(apart.state_dict())


@pytest.mark.parametrize("gate", [Outside(0.5, 2.0), Outside(high=2.0), NOT_FINITE, Since(7), NEVER], ids=repr)
def test_a_gate_that_compares_looks_ahead_at_what_it_opens_for(gate: Outside | Since) -> None:
    values = np.array([1.0, 0.5, 0.1, -1.0, 2.0, 3.0, np.nan, np.inf, -np.inf, 1.0], np.float32)
    history, rows = History(), np.arange(len(values))
    column = Column(("",), rows, rows, values[:, None])
    ahead = gate.lookahead("train/loss", Upcoming(history, ["train/loss"], {"train/loss": column}))
    assert ahead is not None
    assert ahead.tolist() == [gate(step, value, history) for step, value in enumerate(values.tolist())]


def test_what_a_lookahead_adds_to_a_gate_narrows_it() -> None:
    few = [rule for rule in all_rules() if rule.name == "lr-never-decays"]
    info = RunInfo(groups=({"lr": 1e-3},), hyperparameters={"total_steps": 10})
    look = few[0].looking_ahead(RuleSet.of(few).settings[few[0].code], info)
    rows = np.arange(12)
    lr = np.where(rows % 2, 1e-3, 1e-4).astype(np.float32)[:, None]
    assert look is not None
    possible = look("train/lr", Upcoming(History(), ["train/lr"], {"train/lr": Column(("0",), rows, rows, lr)}))
    assert possible is not None
    assert np.flatnonzero(possible).tolist() == [9, 11]  # late, and not low


def test_what_gates_ask_for_has_seen_the_readings_that_joined_together() -> None:
    rng = np.random.default_rng(0)
    values, spike = np.exp(rng.normal(size=(300, 1))).astype(np.float32), Spike()
    together, apart = History(), History()
    blocks = [Block(step, 0.0, "train/loss", ("",), row) for step, row in enumerate(values)]
    for history in (together, apart):
        for block in blocks[:40]:
            history.append([block])
        history.baseline("train/loss", spike), history.newest("train/loss"), history.is_rising("train/loss", 16)
    together.extend("train/loss", ("",), np.arange(40, 299), values[40:299])
    for block in blocks[40:299]:
        apart.append([block])
    for history in (together, apart):
        history.append([blocks[299]])
    levels = [history.baseline("train/loss", spike) for history in (together, apart)]
    assert levels[0].__dict__ == levels[1].__dict__
    newest = [history.newest("train/loss") for history in (together, apart)]
    assert (newest[0].two, newest[0].peak, newest[0].lowest) == (newest[1].two, newest[1].peak, newest[1].lowest)
    assert together.is_rising("train/loss", 16) == apart.is_rising("train/loss", 16)
    assert repr(together.state_dict()) == repr(apart.state_dict())


def test_few_steps_of_a_quiet_run_are_judged_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Rows:
        rng = np.random.default_rng(0)
        for row in range(3000):
            loss = (1 + 2 * np.exp(-row / 500)) * np.exp(0.05 * rng.normal())
            values = light(loss, np.exp(0.1 * rng.normal()))
            if row % 10 == 0:
                values["speed/phase_seconds", PHASES] = np.array([0.01, 0.03, 0.04, 0.01, 0.01, 0.0])
            values["gradient_metric/norm", TENSORS] = np.exp(0.2 * rng.normal(size=5))
            yield values

    judged: list[int] = []
    judge = Judge.__call__

    def counted(self: Judge, step: int, *rest: Any) -> Any:
        judged.append(step)
        return judge(self, step, *rest)

    monkeypatch.setattr(Judge, "__call__", counted)
    with stored(tmp_path / "run", rows()) as run:
        assert judged_steps(run, Config().rule_set()).alerts == ()
    assert len(judged) < 150
    assert judged[0] == 0


def test_every_rule_that_light_readings_trigger_can_look_ahead() -> None:
    """Without that, each step of every run would be judged by itself."""
    names = {name for name, _ in light(1.0, 1.0)} | {"speed/phase_seconds", "rank/loss", "gradient_metric/norm"}
    settings = Config().rule_set().settings
    triggered = [rule for rule in all_rules() if names & {*rule.when}]
    assert not [rule.name for rule in triggered if rule.looking_ahead(settings.get(rule.code), INFO) is None]


def test_a_rule_that_cannot_look_ahead_judges_every_step(tmp_path: Path) -> None:
    seen: list[int] = []

    @rule(
        "L901", "every-loss", reads=("train/loss",), message="A loss of {value}",
        remedies=(advise("look", "Look at it", "it is there"),),
    )  # fmt: skip
    def every_loss(loss: Series) -> Any:
        """A loss.

        ## Why is this bad?
        It is not.

        ## Example
        fires: 7.0
        quiet: 1.0
        """
        seen.append(loss.at)
        return finding(Severity.INFO, loss.last, 1.0) if loss.last > 5 else None

    with stored(tmp_path / "run", (light(7.0 if row == 77 else 1.0, 1.0) for row in range(200))) as run:
        ledger = judged_steps(run, RuleSet.of([every_loss]))
    assert seen == list(range(200))
    assert [alert.since for alert in ledger.alerts] == [77]


def test_an_alert_is_resolved_at_the_step_at_which_it_would_be_live(tmp_path: Path) -> None:
    def losses() -> Rows:
        rng = np.random.default_rng(1)
        for row in range(900):
            yield light((20.0 if row in (200, 700) else 2.0) * np.exp(0.01 * rng.normal()), 1.0)

    rule_set = Config().rule_set()
    with stored(tmp_path / "run", losses()) as run:
        together, apart = judged_steps(run, rule_set), one_by_one(run, rule_set)
    assert [alert.since for alert in apart.alerts if alert.name == "loss-spike"] == [200, 700]
    assert repr(together.state_dict()) == repr(apart.state_dict())


@pytest.mark.parametrize("level", [Baseline(Spike()), RollingMedian(16)], ids=["baseline", "rolling median"])
def test_a_copy_of_a_level_continues_as_the_level_would(level: Baseline | RollingMedian) -> None:
    values = np.exp(np.random.default_rng(0).normal(size=300)).tolist()
    values[200:240] = [1000.0] * 40
    for value in values[:150]:
        level.observe(value)
    copied = level.copy()
    for value in values[150:]:
        copied.observe(value)
    assert level.seen == 150
    for value in values[150:]:
        level.observe(value)
    assert level.__dict__ == copied.__dict__

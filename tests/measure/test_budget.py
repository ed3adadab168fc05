"""Detail keeps to its share of the run's time, by a clock that the tests turn."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import forewarn
from forewarn.config import Config
from forewarn.judge.diagnosis import replay
from forewarn.judge.rules import all_rules
from forewarn.measure.budget import Budget
from forewarn.measure.schedule import Escalation, Schedule
from forewarn.types import AlertState, Severity

TRAINING, LIGHT, DETAIL = 0.010, 0.0001, 0.005
"""Seconds of a step without the monitor, of the monitor on every step, and on measured ones in addition."""
OTHER_RULES = [rule.code for rule in all_rules() if rule.code not in ("X106", "L101")]


class Turning(forewarn.Probe):
    """Takes as long as measuring would, on a clock that stands still otherwise."""

    name = "turning"
    metrics = ()

    def __init__(self):
        self.now = 0.0
        self.measured = []

    def collect(self, step):
        self.measured.append(step.measured)
        self.now += LIGHT + DETAIL * step.measured


class Watched:
    def __init__(self, path, budget, **settings):
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.turning = Turning()
        settings = {"every": 10, "views": [], "config": {"disable": OTHER_RULES}, **settings}
        self.monitor = forewarn.watch(
            self.model, self.optimizer, path, budget=budget, probes=[self.turning], **settings
        )
        watch = self.monitor._stopwatch
        watch.clock, watch._since = lambda: self.turning.now, 0.0

    def run(self, steps, scale=1.0):
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = scale * self.model(torch.ones(4, 2)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.turning.now += TRAINING
            self.monitor.step(loss)
        return self

    def measured(self, first):
        return [step for step, is_measured in enumerate(self.turning.measured) if step >= first and is_measured]


def test_the_interval_is_stretched_at_step_500_to_what_the_budget_allows(tmp_path):
    watched = Watched(tmp_path / "run", budget=0.01)
    watched.run(1100).monitor.close()
    at_least = DETAIL * (1 - 0.01) / (0.01 * (TRAINING + LIGHT))
    assert 20 < at_least < 50, "so the first of 10, 20, 50, … that is enough is 50"
    assert watched.measured(0) == [*range(10), *range(10, 500, 10), *range(500, 1100, 50)]
    (alert,) = watched.monitor.alerts
    assert (alert.code, alert.severity, alert.state) == ("X106", Severity.INFO, AlertState.FIRING)
    assert (alert.finding.value, alert.finding.bound, alert.finding.evidence) == (50.0, 10.0, {"budget": 0.01})
    with forewarn.open_run(tmp_path / "run") as run:
        intervals = run.series("monitor/detail_interval")
        assert (intervals.steps.tolist(), intervals.values.tolist()) == ([500], [50.0])
        assert run.info.budget == 0.01
        assert len(run.series("train/loss")) == len(run.series("gradient/global_norm")) == 1100, "never thinned"
        assert repr(replay(run, Config.from_stored(run.config).rule_set()).alerts) == repr(watched.monitor.alerts)
        seconds = run.series("speed/step_seconds")
        late = seconds.steps > 605  # the last 494 steps, 9 of them measured
        own = (run.series("monitor/overhead_share").values[late] * seconds.values[late]).sum()
    assert own == pytest.approx(494 * LIGHT + 9 * DETAIL, rel=1e-4), "what it goes by is what it reports"
    assert 0.01 * seconds.values[late].sum() > 9 * DETAIL


def test_without_a_budget_or_within_it_nothing_changes(tmp_path):
    for budget in (None, 0.2):
        watched = Watched(tmp_path / str(budget), budget)
        watched.run(520).monitor.close()
        assert watched.measured(10) == list(range(10, 520, 10))
        assert watched.monitor.alerts == ()


def test_the_steps_after_a_warning_are_measured_whatever_they_cost(tmp_path):
    watched = Watched(tmp_path / "run", budget=0.01)
    watched.run(600)
    watched.run(1, scale=math.nan)
    with torch.no_grad():
        for parameter in watched.model.parameters():
            parameter.fill_(0.5)
    watched.run(100).monitor.close()
    assert watched.measured(501) == [550, *range(600, 621), 650, 700]


def test_a_resumed_run_keeps_its_interval_with_and_without_its_state(tmp_path):
    first = Watched(tmp_path / "run", budget=0.01)
    first.run(520)
    state = first.monitor.state_dict()
    first.run(30).monitor.close()
    rewound = Watched(tmp_path / "other", budget=0.01)
    rewound.monitor.load_state_dict(state)
    rewound.run(100).monitor.close()
    assert [520 + step for step in rewound.measured(0)] == [550, 600]
    resumed = Watched(tmp_path / "run", budget=0.01, resume=True)
    resumed.run(110).monitor.close()
    assert [550 + step for step in resumed.measured(0)] == [550, 600, 650]
    unlimited = Watched(tmp_path / "unlimited", budget=None)
    unlimited.monitor.load_state_dict(state)
    unlimited.run(25).monitor.close()
    assert [520 + step for step in unlimited.measured(0)] == [520, 530, 540]


def test_one_slow_step_decides_nothing():
    budget = Budget(0.01, planned=100)
    for step in range(10):
        budget.see(step, step * TRAINING, 0.0 if step < 5 else 9.0, is_measured=step == 5, is_exempt=False)
    assert budget.interval(100) is None


def test_an_interval_from_an_agreed_step_on_replaces_the_one_before():
    schedule = Escalation(Schedule(every=10, dense=2), steps=3)
    schedule.stretch(500, 50)
    schedule.stretch(1000, 200)
    assert [step for step in range(1401) if schedule.measured(step)] == [
        0, 1, *range(10, 500, 10), *range(500, 1000, 50), 1000, 1200, 1400,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("budget", "every", "error", "message"),
    [
        (5, 100, ValueError, "between 0 and 1, not 5; for 5%, write 0.05"),
        (0.0, 100, ValueError, "between 0 and 1, not 0.0"),
        (math.nan, 100, ValueError, "between 0 and 1, not nan"),
        ("1%", 100, TypeError, "budget must be a share of the run's time, such as 0.01, or None, not '1%'"),
        (True, 100, TypeError, "budget must be a share"),
        (0.01, lambda step: True, ValueError, "every must be a number or a Schedule, not a function"),
    ],
)
def test_a_wrong_budget_is_refused(budget, every, error, message, small, tmp_path):
    with pytest.raises(error, match=message):
        forewarn.watch(*small, tmp_path / "run", every=every, budget=budget)

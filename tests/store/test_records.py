"""Findings, alerts, actions and events come back as they were."""

from __future__ import annotations

import math
import time
from types import MappingProxyType

import numpy as np
import pytest

from forewarn.store import open_run
from forewarn.types import Action, Alert, AlertState, Finding, Remedy, Severity

_FINDING = Finding(
    "G201", "blocks.0.ж", 7, Severity.CRITICAL, math.inf, -math.inf, {"ratio": 1e-30, "cause": "zero lr"}
)


def _alert(since: int, state: AlertState, scope: str = "") -> Alert:
    announced = None if state is AlertState.PENDING else _FINDING
    remedy = Remedy("lower_lr", {"from": 3e-4, "to": 1.5e-4, "group": "all"}, "the loss rises", "opt_in")
    return Alert(
        "L102", "loss-spike", scope, Severity.WARNING, state, since, since + 1, 9, _FINDING, (remedy, remedy), announced
    )


def test_findings_and_actions_come_back_equal(tmp_path, write):
    actions = [Action(7, "L102", "", "skip_batch", {"count": 1, "why": "spike"}), Action(9, "L102", "a", "stop")]
    writer = write()
    writer.record(7, findings=[_FINDING, _FINDING], actions=actions)
    writer.close()
    with open_run(tmp_path / "run") as run:
        assert run.findings() == [_FINDING, _FINDING]
        assert run.actions() == actions


def test_a_nan_and_numbers_of_numpy_come_back_as_numbers(tmp_path, write):
    evidence = MappingProxyType({"worst": np.float32("nan"), "count": np.int64(3), "share": np.float32(0.25)})
    writer = write()
    writer.record(1, findings=[Finding("L101", "", 1, Severity.INFO, math.nan, np.float32(0.5), evidence)])
    writer.close()
    with open_run(tmp_path / "run") as run:
        [found] = run.findings()
    assert math.isnan(found.value)
    assert found.bound == 0.5
    assert math.isnan(found.evidence["worst"])
    assert (found.evidence["count"], found.evidence["share"]) == (3, 0.25)


def test_the_newest_state_of_every_episode_counts_and_every_change_is_kept(tmp_path, write):
    writer = write()
    before = time.time()
    writer.record(1, alerts=[_alert(1, AlertState.PENDING)])
    writer.record(2, alerts=[_alert(1, AlertState.FIRING), _alert(2, AlertState.PENDING, scope="a")])
    writer.record(9, alerts=[_alert(1, AlertState.RESOLVED)])
    writer.record(20, alerts=[_alert(20, AlertState.PENDING)])
    writer.close()
    with open_run(tmp_path / "run") as run:
        assert run.alerts() == [
            _alert(1, AlertState.RESOLVED),
            _alert(2, AlertState.PENDING, "a"),
            _alert(20, AlertState.PENDING),
        ]
        changes = run.alert_changes()
        assert [one.step for one in changes] == [1, 2, 2, 9, 20]
        assert [one.alert.state for one in changes][:3] == [AlertState.PENDING, AlertState.FIRING, AlertState.PENDING]
        assert all(before <= one.time <= time.time() for one in changes)


def test_events_keep_their_kind_time_and_data(tmp_path, write):
    writer = write()
    before = time.time()
    writer.event("probe_failed", why="ValueError: no \udcff here", share=math.inf, kind="probe")
    writer.close("stopped by hand")
    with open_run(tmp_path / "run") as run:
        failed, end = run.events()
        told = {"why": "ValueError: no \udcff here", "share": math.inf, "kind": "probe"}
        assert (failed.kind, failed.data) == ("probe_failed", told)
        assert before <= failed.time <= end.time <= time.time()
        assert run.end == ("stopped by hand", end.time)


def test_closing_twice_ends_the_run_once(tmp_path, write):
    writer = write()
    writer.close("stopped")
    writer.close("completed")
    writer.event("late")
    writer.record(1, findings=[_FINDING])
    writer.flush()
    with open_run(tmp_path / "run") as run:
        assert [(one.kind, one.data) for one in run.events()] == [("end", {"reason": "stopped"})]
        assert run.findings() == []


@pytest.mark.parametrize("kind", ["k", "lone \ud800 surrogate"])
def test_any_text_is_a_kind_of_event(tmp_path, write, kind):
    writer = write()
    writer.event(kind)
    writer.close()
    assert writer.failure is None
    with open_run(tmp_path / "run") as run:
        assert run.events()[0].kind == kind.replace("\ud800", "\\ud800")

"""Health checks agree with the rules, the verdict and the line at the end of a run."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

import forewarn
from forewarn.config import Config
from forewarn.judge.checklist import COVERED, NO_WARNINGS
from forewarn.judge.diagnosis import Diagnosis, replay
from forewarn.judge.examples import Example, examples
from forewarn.judge.forecast import LossCurve
from forewarn.judge.rules import all_rules
from forewarn.standing import NOT_FALLING, VERDICTS, open_alerts, open_words
from forewarn.store import RunWriter, open_run
from forewarn.types import AlertState, RunEnd, Severity
from forewarn.views.console import AlertLines
from tests.golden.command_line import HERE, RUNS
from tests.judge.test_diagnosis import state_of

ANOTHER_QUESTION = {"U107", "U108", "U109", "U110", "U111", "T103"}
"""About the schedule of the learning rate and the direction of gradients, of which no check speaks."""
EXAMPLES = [
    pytest.param(example, id=f"{rule.code}-{number}")
    for rule in all_rules()
    for number, example in enumerate(examples(rule))
    if example.fires
]


def contradictions(diagnosis: Diagnosis) -> list[str]:
    """Where a health check, an alert or the verdict says something else than another."""
    wrong = []
    for alert in diagnosis.alerts:
        if alert.state is not AlertState.FIRING:
            continue
        for check in diagnosis.checklist:
            covers = alert.code in COVERED.get(check.name, ()) or (
                check.name == NO_WARNINGS and alert.severity > Severity.INFO
            )
            if covers and (check.state == "pass" or (alert.severity > Severity.INFO and check.state != "fail")):
                wrong.append(f"{check.name} is {check.state} beside {alert.name}")
    failed = [check.name for check in diagnosis.checklist if check.state == "fail"]
    if failed and diagnosis.exit_code == 0:
        wrong.append(f"the verdict is {diagnosis.verdict}, but {failed} failed")
    if diagnosis.verdict == VERDICTS[0] and state_of(diagnosis, NO_WARNINGS) != "pass":
        wrong.append("a healthy run has warnings")
    falling = state_of(diagnosis, "loss falling")
    if diagnosis.verdict == NOT_FALLING and falling == "pass":
        wrong.append(f"the verdict is {diagnosis.verdict}, but loss falling is {falling}")
    return wrong


def diagnosis_of(path: Path) -> Diagnosis:
    with open_run(path) as run:
        return replay(run, Config.from_stored(run.config).rule_set())


def test_every_rule_about_loss_gradients_updates_and_tasks_is_covered_by_one_check():
    codes = [code for covered in COVERED.values() for code in covered]
    assert len(codes) == len(set(codes))
    about = {rule.code for rule in all_rules() if rule.code[0] in "LGUT"}
    assert about - set(codes) == ANOTHER_QUESTION
    assert set(codes) <= {rule.code for rule in all_rules()}


@pytest.mark.parametrize("name", RUNS)
def test_nothing_that_is_said_of_a_stored_run_contradicts_something_else(name, tmp_path):
    with tarfile.open(HERE / "stored" / f"{name}.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    assert contradictions(diagnosis_of(tmp_path / name)) == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_nothing_that_is_said_of_an_example_of_a_rule_contradicts_something_else(example: Example, tmp_path):
    writer = RunWriter(tmp_path / "run", info=example.info, config=Config().to_dict())
    for step, blocks in example.steps():
        writer.append(step, blocks)
    writer.close()
    assert contradictions(diagnosis_of(tmp_path / "run")) == []


def recorded(path: Path, small, losses) -> str:
    """A run with these losses, and what it printed."""
    stream = io.StringIO()
    config = {"disable": ["optimizer-not-stepping"]}
    with forewarn.watch(*small, path, config=config, views=[AlertLines(stream)]) as monitor:
        for loss in losses:
            monitor.step(loss)
    return stream.getvalue()


def test_a_loss_on_a_plateau_is_not_called_falling(tmp_path, small):
    """As it was reported: the alert stood beside a tick and `2.315 → 2.306`."""
    noise = np.random.default_rng(0).normal(0, 1e-3, 1200)
    recorded(tmp_path / "run", small, 2.306 + 0.01 * np.exp(-np.arange(1200) / 300) + noise)
    diagnosis = diagnosis_of(tmp_path / "run")
    assert diagnosis.is_falling
    [check] = [check for check in diagnosis.checklist if check.name == "loss falling"]
    assert check.state == "fail"
    assert check.detail == "2.314 → 2.306; open: loss-not-starting"
    assert contradictions(diagnosis) == []


@pytest.mark.parametrize("losses", [[2.3] * 200, [3.0, 2.0] * 100, list(np.linspace(2, 1, 200)), [1.0] * 5])
def test_the_line_at_the_end_and_check_have_the_same_verdict(losses, tmp_path, small):
    printed = recorded(tmp_path / "run", small, losses)
    diagnosis = diagnosis_of(tmp_path / "run")
    serious = [alert for alert in diagnosis.alerts if alert.severity > Severity.INFO]
    words = open_words(serious) if open_alerts(serious) else diagnosis.verdict
    assert f"run: {words} · {len(losses)} steps" in printed
    assert contradictions(diagnosis) == []


def test_a_run_that_learns_nothing_has_no_tick_at_its_end():
    stream = io.StringIO()
    AlertLines(stream).end(RunEnd(Path("runs/a"), NOT_FALLING, 0, 200, 59, (), 2.3, 2.3))
    assert stream.getvalue().startswith("· forewarn  runs/a: no warnings, but the loss is not falling · 200 steps")


noisy = 0.8 + 0.25 * np.random.default_rng(2).standard_normal(160)


@pytest.mark.parametrize(
    ("losses", "is_falling"),
    [
        ([5.0] * 10 + [1.0] * 390, True),
        ([2.3] * 400, False),
        (list(2.3 + 0.1 * np.random.default_rng(0).standard_normal(400)), False),
        (list(noisy + np.linspace(1, 0, 160) ** 4), True),
        (list(noisy + np.linspace(1, 0, 160) ** 4 + 0.5 * (np.arange(160) > 120)), False),
        (list(0.6 + 4 * np.exp(-np.arange(3000) / 60) + 0.01 * np.random.default_rng(1).standard_normal(3000)), True),
    ],
    ids=[
        "over after ten steps",
        "flat",
        "flat and noisy",
        "level and noisy at the end",
        "risen again",
        "at its floor since the first tenth",
    ],
)
def test_a_fall_that_is_over_early_is_a_fall(losses, is_falling):
    assert LossCurve.of(range(len(losses)), losses).is_falling is is_falling

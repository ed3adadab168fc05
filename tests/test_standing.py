"""One wording for each state of a run, in every view and command."""

from __future__ import annotations

import ast
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

import forewarn
from forewarn import standing
from forewarn.cli import main
from forewarn.standing import alert_words, open_words, run_state
from forewarn.types import AlertState, Severity
from forewarn.views.console import plain_console
from tests.judge.test_diagnosis import alert

SOURCE = Path(forewarn.__file__).parent
OTHER_WORDS = re.compile(
    r"alerts? firing|still firing|warnings? firing|not closed:|still trains|all is well|"
    + "|".join(map(re.escape, (standing.TOO_EARLY, standing.NO_ALERTS, standing.NOT_FALLING)))
)
"""Words of `standing.py`, and those that once stood for the same."""
STATES = {standing.RUNNING, standing.FAILED}
STYLED = {"cli/ls.py"}
"""Files that give the states of runs a colour."""


def texts(tree: ast.AST) -> list[str]:
    """Every string in a module that is not a docstring."""
    documentation = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documentation
    ]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_other_module_has_words_of_its_own_for_a_state(path):
    if path.name == "standing.py":
        return
    for text in texts(ast.parse(path.read_text())):
        assert not OTHER_WORDS.search(text), f"{path}: {text!r} belongs to standing.py"
        if str(path.relative_to(SOURCE)) not in STYLED:
            assert text not in STATES, f"{path}: {text!r} belongs to standing.py"


@pytest.fixture
def told(tmp_path, small, capsys, monkeypatch):
    """What is said of a run with these losses: by the live view, the line at its end, and each command."""

    def tell(losses) -> dict[str, str]:
        live, lines = io.StringIO(), io.StringIO()
        view = forewarn.LiveView(every=1, console=plain_console(live))
        config = {"disable": ["optimizer-not-stepping", "frozen-weight", "unavailable"]}
        views = [view, forewarn.AlertLines(lines)]
        with forewarn.watch(*small, tmp_path / "runs" / "a", config=config, views=views) as monitor:
            for loss in losses:
                monitor.step(loss)
        said = {"live": live.getvalue().splitlines()[-1], "end": lines.getvalue(), "picture": view._alerts()}
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.chdir(tmp_path)
        for command in ("check", "forecast", "ls", "check --json"):
            name, *options = command.split()
            with pytest.raises(SystemExit):
                main([name, *(["runs/a"] if name != "ls" else []), *options])
            said[command] = capsys.readouterr().out
        return said

    return tell


def test_a_healthy_run_is_healthy_everywhere(told):
    said = told(2 + 3 * np.exp(-np.arange(300) / 50))
    assert "runs/a: healthy · 300 steps" in said["end"]
    assert "\nhealthy: no alerts" in said["check"]
    assert json.loads(said["check --json"])["verdict"] == "healthy"
    assert said["picture"] == "no alerts"
    assert " none " in said["ls"]
    assert "open" not in said["forecast"] + said["live"]
    assert ", completed\n" in said["check"]
    assert " completed " in said["ls"]


def test_an_open_warning_is_counted_in_the_same_words_everywhere(told):
    said = told([*(2 + 3 * np.exp(-np.arange(300) / 50)), *[9.0] * 3])
    words = said["picture"]
    assert re.fullmatch(r"1 (warning|critical)(, \d \w+)* open", words)
    assert said["live"].endswith(words)
    serious = words.removesuffix(" open").partition(",")[0]
    verdict = {"1 warning": "warnings", "1 critical": "critical"}[serious]
    assert f"runs/a: {serious} open · 303 steps" in said["end"]
    assert f"\n{verdict}: {words}\n" in said["check"]
    assert json.loads(said["check --json"])["verdict"] == verdict
    assert f"{serious} open: " in said["forecast"]
    assert serious in said["ls"]


def test_a_run_that_learns_nothing_is_called_so_everywhere(told):
    said = told([2.3] * 100)
    assert f"runs/a: {standing.NOT_FALLING} · 100 steps" in said["end"]
    assert f"\n{standing.NOT_FALLING}: no alerts" in said["check"]
    assert json.loads(said["check --json"])["verdict"] == standing.NOT_FALLING
    assert "too early to tell" in said["forecast"]


def test_alerts_in_words():
    firing, over = alert(Severity.WARNING, AlertState.FIRING), alert(Severity.CRITICAL, AlertState.RESOLVED)
    assert alert_words([]) == open_words([]) == open_words([over]) == "no alerts"
    assert open_words([firing, firing, over]) == "2 warnings open"
    assert alert_words([firing, over]) == "1 warning open, 1 critical resolved"
    assert alert_words([over]) == "1 critical resolved"


@pytest.mark.parametrize(
    ("end", "age", "state"),
    [
        (None, 1.0, "running"),
        (None, 310.0, "stalled"),
        (None, 3600.0, "interrupted"),
        ("completed", 3600.0, "completed"),
        ("KeyboardInterrupt", 1.0, "interrupted"),
        ("ValueError: no", 1.0, "failed"),
        ("OutOfMemoryError", 1.0, "failed"),
        ("torch.OutOfMemoryError: 3 GiB", 1.0, "failed"),
        ("not closed", 1.0, "failed"),
        ("Converged: the loss is low", 1.0, "completed"),
        ("early stopping: no progress for 5 epochs", 1.0, "completed"),
    ],
)
def test_the_state_of_a_run(end, age, state, monkeypatch):
    monkeypatch.setattr(standing.time, "time", lambda: 10_000.0)
    assert run_state(end, 10_000.0 - age) == state

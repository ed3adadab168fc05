"""What a person sees: the screens of the commands and of a live run, as text on terminals of several kinds.

The live screens replay stored runs, so that no number depends on the machine. `make pictures` draws them.
"""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pyte

from forewarn.cli import main
from forewarn.config import Config
from forewarn.judge.judgement import Judge
from forewarn.judge.ledger import Ledger
from forewarn.standing import exit_code, verdict
from forewarn.store import open_run
from forewarn.types import RunEnd, RunStart
from forewarn.views.console import AlertLines
from tests.golden.command_line import HERE, RUNS

WIDTHS = (80, 120)


class Screen(io.StringIO):
    """A terminal, or a file, that keeps everything that was written to it."""

    def __init__(self, is_terminal: bool = True, encoding: str = "utf-8") -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self._encoding = encoding

    @property
    def encoding(self) -> str:
        return self._encoding

    def isatty(self) -> bool:
        return self._is_terminal


def command(*arguments: str) -> Callable[[Screen], None]:
    """A screen of a command."""

    def shown(screen: Screen) -> None:
        with contextlib.redirect_stdout(screen), contextlib.suppress(SystemExit):
            main(arguments)

    return shown


def live(name: str) -> Callable[[Screen], None]:
    """The screen of a training loop: the default view, fed with a stored run."""

    def shown(screen: Screen) -> None:
        view = AlertLines(screen)
        with open_run(name) as run:
            rule_set = Config.from_stored(run.config).rule_set()
            num_rules = len(rule_set.rules)
            history, judge, ledger = rule_set.history(run.info), Judge(rule_set, run.info), Ledger(rule_set.rules)
            view.begin(RunStart(Path("runs", name), run.info, num_rules))
            for step, blocks in run.steps():
                changed = ledger.update(judge(step, history, history.append(blocks)), history, run.info)
                view.show(step, blocks, changed, ())
            losses = run.series("train/loss").values
            alerts = ledger.ranked(ledger.alerts)
            told = verdict(alerts, is_falling=True), exit_code(alerts)
            ends = float(losses[0]), float(losses[-1])
            view.end(RunEnd(Path("runs", name), *told, len(losses), num_rules, alerts, *ends))

    return shown


SCREENS: dict[str, Callable[[Screen], None]] = {
    "live-healthy": live("healthy-gpt"),
    "live-one-alert": live("frozen-weight"),
    "live-grouped": live("lr-jump"),
    "live-resolved": live("recovered"),
    "live-epochs": live("evaluation"),
    "check-healthy": command("check", "healthy-gpt"),
    "check-faulty": command("check", "lr-jump"),
    "watch": command("watch", "lr-jump", "--once"),
    "show": command("show", "lr-jump"),
    "show-layers": command("show", "healthy-gpt", "--scope", "blocks.0"),
    "forecast": command("forecast", "healthy-gpt"),
    "ls": command("ls", "."),
    "explain": command("explain", "loss-spike"),
    "explain-search": command("explain", "nan"),
    "unknown-command": command("chek"),
    "rules": command("rules"),
}


@contextlib.contextmanager
def stored_runs(folder: Path) -> Iterator[None]:
    """All stored runs, unpacked in a folder, which is the working directory meanwhile."""
    for run in RUNS:
        with tarfile.open(HERE / "stored" / f"{run}.tar.xz") as packed:
            packed.extractall(folder, filter="data")
    with contextlib.chdir(folder):
        yield


NOW = 1794950000.0
"""The time at which runs are listed: 17 November 2026."""


def written(name: str, width: int, screen: Screen, **environment: str) -> str:
    """What is written to a screen of this width, escape sequences included."""
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLORTERM")}
    terminal = {"TERM": "xterm-256color", "COLUMNS": str(width), "LINES": "50", **environment}
    with (
        mock.patch.dict(os.environ, {**kept, **terminal}, clear=True),
        mock.patch("time.time", return_value=NOW),
        contextlib.redirect_stderr(screen),
    ):
        SCREENS[name](screen)
    return screen.getvalue()


def displayed(text: str, width: int) -> pyte.Screen:
    """The terminal after this was written to it: long enough for all of it, the cursor below the last line."""
    terminal = pyte.Screen(width, text.count("\n") + 2)
    terminal.set_mode(pyte.modes.LNM)
    pyte.Stream(terminal).feed(text)
    return terminal


def screens(folder: Path) -> dict[str, str]:
    """Every screen as a person reads it, at every width, by the name of its file."""
    with stored_runs(folder):
        return {
            f"screens/{name}-{width}.txt": lines(written(name, width, Screen()), width)
            for name in SCREENS
            for width in WIDTHS
        }


def lines(text: str, width: int) -> str:
    """The lines that are on the screen in the end."""
    shown = [line.rstrip() for line in displayed(text, width).display]
    return "\n".join(shown).rstrip() + "\n"

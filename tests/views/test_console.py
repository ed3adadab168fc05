"""Alerts as lines."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.text import Text

from forewarn.types import Action, AlertState, Severity
from forewarn.views.console import QUIET_STEPS, AlertLines
from tests.views.made import alert, block


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_an_alert_is_told_with_its_numbers_and_what_to_do(stream: io.StringIO) -> None:
    AlertLines(stream).show(7, [], [alert()], [])
    assert stream.getvalue().splitlines() == [
        "forewarn step 7: warning loss-spike (L102): 9 (bound 3), lasting steps 4",
        "    1. lower_lr 0.0003 → 0.00015: smaller steps keep the loss low",
        "    2. lower_lr 0.0003 → 0.00015: smaller steps keep the loss low",
        "    why: forewarn explain loss-spike",
    ]


def test_an_alert_about_gradients_comes_with_their_profile_over_the_depth(stream: io.StringIO) -> None:
    norms = block(7, "gradient/block_norm", 1e-8, 1e-4, float("nan"), 0.0, 1.0, scopes=tuple("abcde"))
    view = AlertLines(stream)
    view.show(7, [norms], [alert("L102")], [])
    assert "by depth" not in stream.getvalue()
    view.show(8, [norms], [alert("G102")], [])
    assert "    gradient by depth: a 1e-8 ▁▄·█ e 1\n" in stream.getvalue()


def test_a_very_deep_model_is_one_line_as_well(stream: io.StringIO) -> None:
    norms = block(7, "gradient/block_norm", *range(1, 501), scopes=tuple(f"blocks.{at}" for at in range(500)))
    AlertLines(stream).show(7, [norms], [alert("G102")], [])
    line = next(line for line in stream.getvalue().splitlines() if "by depth" in line)
    assert line.startswith("    gradient by depth: blocks.0 1 ▁")
    assert line.endswith("█ blocks.499 500")
    assert len(line) < 120


def test_a_thousand_layers_are_one_line_that_names_the_worst(stream: io.StringIO) -> None:
    alerts = [alert("U102", f"layers.{at}.weight", value=0.1 + at, bound=0.1) for at in range(1000)]
    AlertLines(stream).show(7, [], alerts, [])
    lines = stream.getvalue().splitlines()
    assert len(lines) <= 5
    assert "in 1000 places, worst layers.999.weight: 999.1 (bound 0.1)" in lines[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_the_worst(stream: io.StringIO, value: float) -> None:
    AlertLines(stream).show(7, [], [alert("G102", "a", value=1e9), alert("G102", "b", value=value)], [])
    assert "worst b" in stream.getvalue()


def test_far_below_the_bound_is_worse_than_just_below(stream: io.StringIO) -> None:
    AlertLines(stream).show(7, [], [alert("G102", "a", value=1e-9), alert("G102", "b", value=2.9)], [])
    assert "worst a" in stream.getvalue()


def test_the_run_as_a_whole_is_a_place_too(stream: io.StringIO) -> None:
    AlertLines(stream).show(7, [], [alert("U102", "", value=50.0), alert("U102", "w", value=4.0)], [])
    assert "update-ratio-high (U102) in the run as a whole and in 1 place: 50 (bound 3)" in stream.getvalue()


def test_the_first_alert_is_the_root_cause_and_gets_the_remedies(stream: io.StringIO) -> None:
    AlertLines(stream).show(7, [], [alert("U102", "w"), alert("L102")], [])
    lines = stream.getvalue().splitlines()
    assert "update-ratio-high" in lines[0]
    assert "loss-spike" in lines[1]
    assert lines[-1] == "    why: forewarn explain update-ratio-high"


def test_more_places_of_what_was_told_are_no_news_for_a_while(stream: io.StringIO) -> None:
    view = AlertLines(stream)
    view.show(7, [], [alert("U102", "a")], [])
    told = stream.getvalue()
    view.show(8, [], [alert("U102", "b")], [])
    assert stream.getvalue() == told
    view.show(9, [], [alert("U102", "b", Severity.CRITICAL)], [])
    assert "critical" in stream.getvalue()[len(told) :], "a higher severity is news at once"
    told = stream.getvalue()
    view.show(9 + QUIET_STEPS, [], [alert("U102", "c")], [])
    assert stream.getvalue() != told


def test_fresh_advice_stands_until_something_worse_comes(stream: io.StringIO) -> None:
    view = AlertLines(stream)
    view.show(7, [], [alert("U102", "a")], [])
    view.show(8, [], [alert("L102")], [])
    assert stream.getvalue().count("    1. ") == 1
    view.show(9, [], [alert("G104", severity=Severity.CRITICAL)], [])
    assert stream.getvalue().count("    1. ") == 2
    view.show(9 + QUIET_STEPS, [], [alert("U102", "b")], [])
    assert stream.getvalue().count("    1. ") == 2, "each kind of alert is advised on once"


def test_what_is_resolved_is_told_unless_it_was_information(stream: io.StringIO) -> None:
    view = AlertLines(stream)
    view.show(50, [], [alert(state=AlertState.RESOLVED), alert("G104", "", Severity.INFO, AlertState.RESOLVED)], [])
    assert stream.getvalue() == "forewarn step 50: resolved loss-spike (L102)\n"


def test_information_comes_without_advice(stream: io.StringIO) -> None:
    AlertLines(stream).show(7, [], [alert(severity=Severity.INFO)], [])
    assert stream.getvalue().count("\n") == 1


def test_actions_are_told(stream: io.StringIO) -> None:
    AlertLines(stream).show(7, [], [], [Action(7, "L102", "", "lower_lr", {"from": 0.1, "to": 0.05})])
    assert stream.getvalue() == "forewarn step 7: done lower_lr 0.1 → 0.05, because of L102\n"


def test_nothing_new_prints_nothing(stream: io.StringIO) -> None:
    view = AlertLines(stream)
    view.show(7, [], [], [])
    view.close()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/]", ":smile:", "[link=http://a]x", "a[bold"])
def test_markup_in_a_name_shows_literally(stream: io.StringIO, name: str) -> None:
    AlertLines(stream).show(7, [], [alert(scope=name)], [])
    assert f"in {name}:" in stream.getvalue()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("a\nb", "a\\nb"),
        ("a\rb", "a\\rb"),
        ("a\x9bb", "a\\x9bb"),
        ("a\u202eb", "a\\u202eb"),
        ("a\udc80b", "a\\udc80b"),
        ("größe.重み", "größe.重み"),
    ],
)
def test_what_a_terminal_would_act_on_is_written_out(stream: io.StringIO, name: str, shown: str) -> None:
    AlertLines(stream).show(7, [], [alert(scope=name)], [])
    assert f"in {shown}:" in stream.getvalue()
    assert stream.getvalue().count("\n") == 4


def test_a_very_long_name_is_cut_in_the_middle(stream: io.StringIO) -> None:
    AlertLines(stream).show(7, [], [alert(scope="start." + "x" * 10_000 + ".end")], [])
    line = stream.getvalue().splitlines()[0]
    assert len(line) < 200
    assert "in start.x" in line
    assert "x.end:" in line


def test_colour_only_on_a_terminal_and_not_with_no_color(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    AlertLines(stream).show(7, [], [alert(severity=Severity.CRITICAL)], [])
    assert "\x1b" not in stream.getvalue()
    terminal = Terminal()
    AlertLines(terminal).show(7, [], [alert(severity=Severity.CRITICAL)], [])
    assert "\x1b[1;31m" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    AlertLines(terminal).show(7, [], [alert(severity=Severity.CRITICAL)], [])
    assert "31m" not in terminal.getvalue()


def test_on_a_terminal_what_does_not_fit_goes_on_indented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    AlertLines(terminal).show(7, [], [alert(scope="a.rather.long.name.of.a.layer")], [])
    first, second, *_ = Text.from_ansi(terminal.getvalue()).plain.splitlines()
    assert first.startswith("forewarn step 7: warning loss-spike (L102) in")
    assert second.startswith("    ")
    plain = Text.from_ansi(terminal.getvalue()).plain
    assert max(map(len, plain.splitlines())) <= 60


def test_standard_error_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    AlertLines().show(7, [], [alert()], [])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "loss-spike" in printed.err


def test_a_reader_that_went_away_does_not_end_the_training() -> None:
    script = """
import os
from forewarn.views.console import AlertLines
from tests.views.made import alert, block
reading, writing = os.pipe()
os.close(reading)
view = AlertLines(os.fdopen(writing, "w", buffering=1))
for step in range(3):
    view.show(step, [], [alert(scope="x" * 70000)], [])
os._exit(42)
"""
    ended = subprocess.run([sys.executable, "-c", script], check=False, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert ended.returncode == 42

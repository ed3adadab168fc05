"""Alerts as lines."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.text import Text

from forewarn.types import Action, Alert, AlertState, RunEnd, RunInfo, RunStart, Severity
from forewarn.views.console import QUIET_STEPS, AlertLines, LogLines
from forewarn.views.wording import deed, outcome
from tests.views.made import alert, block


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_an_alert_says_what_happened_in_which_numbers_and_what_to_do(stream: io.StringIO) -> None:
    AlertLines(stream).show(7, [], [alert(cause="the data changed")], [])
    assert stream.getvalue().splitlines() == [
        "⚠ step 7  The training loss is 3× its usual level (loss-spike)",
        "  loss 9 · limit 3 · usual 3",
        "  cause  the data changed",
        "  do     Lower the learning rate from 0.0003 to 0.00015",
    ]


def test_an_alert_about_gradients_comes_with_their_profile_over_the_depth(stream: io.StringIO) -> None:
    norms = block(7, "gradient/block_norm", 1e-8, 1e-4, float("nan"), 0.0, 1.0, scopes=tuple("abcde"))
    view = AlertLines(stream)
    view.show(7, [norms], [alert("L102")], [])
    assert "by depth" not in stream.getvalue()
    view.show(8, [norms], [alert("G102")], [])
    assert "  gradient by depth: 1e-8 in a ▁▄·█ 1 in e\n" in stream.getvalue()


def test_a_very_deep_model_is_one_line_as_well(stream: io.StringIO) -> None:
    norms = block(7, "gradient/block_norm", *range(1, 501), scopes=tuple(f"blocks.{at}" for at in range(500)))
    AlertLines(stream).show(7, [norms], [alert("G102")], [])
    line = next(line for line in stream.getvalue().splitlines() if "by depth" in line)
    assert line.startswith("  gradient by depth: 1 in blocks.0 ▁")
    assert line.endswith("█ 500 in blocks.499")
    assert len(line) <= 80


def test_a_thousand_layers_are_told_by_the_worst(stream: io.StringIO) -> None:
    alerts = [alert("U102", f"layers.{at}.weight", value=0.1 + at, bound=0.1) for at in range(1000)]
    AlertLines(stream).show(7, [], alerts, [])
    first, second, *rest = stream.getvalue().splitlines()
    assert "layers.999.weight" in first
    assert "ratio 999 · limit 0.1 · the worst of 1000 places" in second
    assert len(rest) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_the_worst(stream: io.StringIO, value: float) -> None:
    AlertLines(stream).show(7, [], [alert("U102", "a", value=1e9), alert("U102", "b", value=value)], [])
    assert " b " in stream.getvalue().splitlines()[0]


def test_far_below_the_bound_is_worse_than_just_below(stream: io.StringIO) -> None:
    AlertLines(stream).show(7, [], [alert("U102", "a", value=1e-9), alert("U102", "b", value=2.9)], [])
    assert " a " in stream.getvalue().splitlines()[0]


def test_symptoms_of_a_cause_that_was_told_share_a_line(stream: io.StringIO) -> None:
    view = AlertLines(stream)
    view.show(7, [], [alert("U102", "w"), alert("L102", follows="U102"), alert("G104", follows="U102")], [])
    *cause, symptoms = stream.getvalue().splitlines()
    assert "update-ratio-high" in cause[0]
    assert symptoms == "⚠ step 7  Following update-ratio-high: loss-spike, gradient-spike"
    told = stream.getvalue()
    view.show(8, [], [alert("G102", follows="U102")], [])
    view.show(12, [], [alert("W102", "a", follows="U102"), alert("W102", "b", follows="U102")], [])
    assert stream.getvalue() == told, "more of them wait"
    view.show(7 + QUIET_STEPS, [], [], [])
    assert stream.getvalue()[len(told) :] == (
        "⚠ step 27  Following update-ratio-high: exploding-gradient, weight-norm-spike in 2 places\n"
    )


def test_a_symptom_that_is_worse_does_not_wait(stream: io.StringIO) -> None:
    view = AlertLines(stream)
    view.show(7, [], [alert("U102", "w"), alert("L102", follows="U102")], [])
    view.show(8, [], [alert("G102", severity=Severity.CRITICAL, follows="U102")], [])
    assert stream.getvalue().splitlines()[-1] == "✖ step 8  Following update-ratio-high: exploding-gradient"


def test_a_symptom_whose_cause_was_not_shown_is_told_in_full(stream: io.StringIO) -> None:
    AlertLines(stream).show(7, [], [alert("L102", follows="U104")], [])
    assert "do     Lower" in stream.getvalue()


def test_more_places_of_what_was_told_are_no_news_for_a_while(stream: io.StringIO) -> None:
    view = AlertLines(stream)
    view.show(7, [], [alert("U102", "a")], [])
    told = stream.getvalue()
    view.show(8, [], [alert("U102", "b")], [])
    assert stream.getvalue() == told
    view.show(9, [], [alert("U102", "b", Severity.CRITICAL)], [])
    assert "✖" in stream.getvalue()[len(told) :], "a higher severity is news at once"
    told = stream.getvalue()
    view.show(9 + QUIET_STEPS, [], [alert("U102", "c")], [])
    assert stream.getvalue()[len(told) :] == "⚠ step 29  Also update-ratio-high in c\n", "it was explained before"
    told = stream.getvalue()
    over = [replace(alert("U102", scope), state=AlertState.RESOLVED) for scope in "abc"]
    view.show(60, [], over, [])
    view.show(9 + 9 * QUIET_STEPS, [], [alert("U102", "c")], [])
    assert "do     Lower" in stream.getvalue()[len(told) :], "a new episode is told in full"


def test_many_causes_at_once_are_a_few_lines(stream: io.StringIO) -> None:
    codes = ["L102", "G102", "U102", "W102", "G104", "U104"]
    AlertLines(stream).show(7, [], [alert(code) for code in codes], [])
    *_, last = stream.getvalue().splitlines()
    assert last == "⚠ step 7  Also: weight-norm-spike, gradient-spike, update-ratio-jump"


def test_resolved_is_told_once_a_cause_is_over_or_nothing_fires(stream: io.StringIO) -> None:
    view = AlertLines(stream)
    view.show(7, [], [alert("U102", "w"), alert(follows="U102"), alert("G104", severity=Severity.INFO)], [])
    told = len(stream.getvalue())
    view.show(50, [], [alert(state=AlertState.RESOLVED, follows="U102")], [])
    assert len(stream.getvalue()) == told, "a symptom is over before its cause"
    info = alert("G104", "", Severity.INFO, AlertState.RESOLVED)
    view.show(60, [], [alert("U102", "w", state=AlertState.RESOLVED), info], [])
    assert stream.getvalue()[told:] == "✓ step 60  Resolved: loss-spike, update-ratio-high in w (steps 5–7)\n"


def test_information_is_told_only_if_asked_for(stream: io.StringIO) -> None:
    AlertLines(stream).show(7, [], [alert(severity=Severity.INFO)], [])
    assert stream.getvalue() == ""
    AlertLines(stream, verbose=True).show(7, [], [alert(severity=Severity.INFO)], [])
    first, second = stream.getvalue().splitlines()
    assert first.startswith("· step 7  The training loss")
    assert second.startswith("  loss 9")


def test_actions_are_told(stream: io.StringIO) -> None:
    AlertLines(stream).show(7, [], [], [Action(7, "L102", "", "lower_lr", {"from": 0.1, "to": 0.05})])
    assert stream.getvalue() == "→ step 7  Lowered the learning rate from 0.1 to 0.05, because of L102\n"


def test_an_action_that_was_not_taken_is_told_without_its_numbers() -> None:
    for action, words in (("lower_clip", "lower the clipping norm"), ("rebalance", "rebalance")):
        told = deed(Action(7, "L102", "", action, {}, failed="the loop does not clip"))
        assert told == f"Could not {words} because of L102: the loop does not clip"


def test_whether_a_return_helped_is_open_until_its_step_is_reached_again(stream: io.StringIO) -> None:
    back = Action(100, "W101", "", "roll_back", {"from": 101, "to": 10}, "NaN or infinity in weights")
    AlertLines(stream).show(100, [], [], [back])
    assert stream.getvalue().endswith("from step 101 to step 10, because of W101 (NaN or infinity in weights)\n")
    assert outcome(replace(back, watched_steps=59)).startswith(
        "W101 may return: step 101 was not reached again within 59 steps"
    )
    assert outcome(replace(back, watched_steps=91)).startswith("W101 not resolved within 91 steps")
    assert outcome(replace(back, watched_steps=95, resolved_after=91)).startswith("W101 resolved after 91 steps")


INFO = RunInfo(model="GPT", num_parameters=1_234_567, optimizers=("AdamW",), every=100)


def test_a_run_is_announced_in_one_line(stream: io.StringIO) -> None:
    AlertLines(stream).begin(RunStart(Path("runs/a"), INFO, 59))
    assert stream.getvalue() == (
        "forewarn  GPT · 1.23 million parameters · AdamW · detail every 100 steps · 59 rules · stored in runs/a\n"
    )


def test_steps_that_a_function_chooses_are_not_called_every_step(stream: io.StringIO) -> None:
    AlertLines(stream).begin(RunStart(Path("runs/a"), replace(INFO, every=0), 59))
    assert " · detail on the steps you chose · " in stream.getvalue()


def ending(*alerts: Alert, code: int = 0) -> RunEnd:
    return RunEnd(Path("runs/a"), ("healthy", "warnings", "critical")[code], code, 500, 59, alerts, 2.3, 0.004)


def test_a_healthy_run_ends_in_one_line(stream: io.StringIO) -> None:
    AlertLines(stream).end(ending())
    assert stream.getvalue() == "✓ forewarn  runs/a: healthy · 500 steps · 59 rules · loss 2.3 → 0.004\n"


def test_a_faulty_run_ends_with_its_cause_what_to_do_and_the_next_command(stream: io.StringIO) -> None:
    note = alert("G104", severity=Severity.INFO)
    AlertLines(stream).end(ending(alert("U102", ""), alert(follows="U102"), note, code=1))
    first, cause, do, command = stream.getvalue().splitlines()
    assert first == "⚠ forewarn  runs/a: 2 warnings open · 500 steps · loss 2.3 → 0.004 · 1 note"
    assert cause.startswith("  cause  ")
    assert "(step 6, update-ratio-high)" in cause
    assert do == "  do     Lower the learning rate from 0.0003 to 0.00015"
    assert command == "  next   forewarn check runs/a"


def test_notes_alone_leave_a_run_healthy_and_are_counted(stream: io.StringIO) -> None:
    AlertLines(stream).end(ending(alert(severity=Severity.INFO)))
    assert stream.getvalue().splitlines() == [
        "✓ forewarn  runs/a: healthy · 500 steps · 59 rules · loss 2.3 → 0.004 · 1 note"
    ]


def test_through_logging_a_step_is_one_record(caplog: pytest.LogCaptureFixture) -> None:
    view = LogLines("mine")
    with caplog.at_level("INFO", "mine"):
        view.begin(RunStart(Path("runs/a"), INFO, 59))
        view.show(7, [], [alert()], [])
        view.show(8, [], [], [])
        view.show(9, [], [alert("G102", severity=Severity.CRITICAL)], [])
        view.end(ending())
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "ERROR", "INFO"]
    assert caplog.records[1].getMessage().startswith("⚠ step 7  The training loss is 3× its usual level (loss-spike)\n")


def test_a_progress_bar_of_tqdm_stays_whole(stream: io.StringIO) -> None:
    tqdm = pytest.importorskip("tqdm")
    bar = tqdm.tqdm(total=10, file=stream, ascii=True, mininterval=0)
    bar.update(3)
    AlertLines(stream).show(7, [], [alert()], [])
    bar.close()
    torn = [line for line in stream.getvalue().replace("\r", "\n").splitlines() if "⚠" in line and "|" in line]
    assert not torn
    assert "\r" in stream.getvalue()[: stream.getvalue().index("⚠")], "the bar is cleared first"


def test_a_stream_that_knows_only_ascii_gets_signs_that_look_alike() -> None:
    raw = io.BytesIO()
    ascii_only = io.TextIOWrapper(raw, "ascii", write_through=True)
    AlertLines(ascii_only).show(7, [], [alert()], [])
    assert raw.getvalue().startswith(
        b"! step 7  The training loss is 3x its usual level (loss-spike)\n  loss 9 - limit 3"
    )


def test_nothing_new_prints_nothing(stream: io.StringIO) -> None:
    view = AlertLines(stream)
    view.show(7, [], [], [])
    view.close()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/]", ":smile:", "[link=http://a]x", "a[bold"])
def test_markup_in_a_name_shows_literally(stream: io.StringIO, name: str) -> None:
    AlertLines(stream).show(7, [], [alert("U102", scope=name)], [])
    assert f"much of {name} (" in stream.getvalue()


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
    AlertLines(stream).show(7, [], [alert("U102", scope=name)], [])
    assert f"much of {shown} (" in stream.getvalue()
    assert stream.getvalue().count("\n") == 3


def test_a_very_long_name_is_cut_in_the_middle(stream: io.StringIO) -> None:
    AlertLines(stream).show(7, [], [alert("U102", scope="start." + "x" * 10_000 + ".end")], [])
    line = stream.getvalue().splitlines()[0]
    assert len(line) < 200
    assert "of start.x" in line
    assert "x.end (" in line


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
    AlertLines(terminal).show(7, [], [alert("U102", scope="a.rather.long.name.of.a.layer")], [])
    first, second, *_ = Text.from_ansi(terminal.getvalue()).plain.splitlines()
    assert first.startswith("⚠ step 7  Each step")
    assert second.startswith("  ")
    assert second.endswith("update-ratio-high")
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


def test_in_a_notebook_an_alert_is_one_output_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "rich.jupyter.display", lambda segments, text: shown.append((text, str({each.style for each in segments})))
    )
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    AlertLines().show(7, [], [alert(cause="the data changed")], [])
    ((text, styles),) = shown
    assert "The training loss is 3× its usual level" in text.splitlines()[0]
    assert len(text.splitlines()) == 4
    assert "yellow" in styles

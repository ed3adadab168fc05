"""The live view."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable

import numpy as np
import pytest
from rich.console import Console

from forewarn.judge.forecast import LossCurve
from forewarn.types import AlertState, Severity
from forewarn.views import live
from forewarn.views.bars import bar_chart
from forewarn.views.live import CHART_BINS, LiveView
from tests.views.made import alert, block


def console(*, terminal: bool, encoding: str = "utf-8") -> Console:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace", write_through=True)
    return Console(
        file=stream, force_terminal=terminal, width=100, markup=False, emoji=False, highlight=False,
        legacy_windows=False, _environ={"TERM": "xterm"},
    )  # fmt: skip


def text_of(where: Console) -> str:
    stream = where.file
    assert isinstance(stream, io.TextIOWrapper)
    raw = stream.buffer
    assert isinstance(raw, io.BytesIO)
    return raw.getvalue().decode(stream.encoding)


def step_of(step: int, loss: float = 2.5) -> list[object]:
    return [
        block(step, "train/loss", loss),
        block(step, "train/loss_ema", 3.0),
        block(step, "train/lr", 1e-4, 1e-3, scopes=("0", "1")),
        block(step, "gradient/global_norm", 0.75),
    ]


def test_without_a_terminal_it_is_one_plain_line_now_and_then() -> None:
    where = console(terminal=False)
    view = LiveView(100, every=50, console=where)
    for step in range(100):
        view.show(step, step_of(step), [], [])
    view.close()
    assert text_of(where).splitlines() == [
        "step 0/100  loss 2.5  EMA 3  lr 0.001  gradient norm 0.75",
        "step 50/100  loss 2.5  EMA 3  lr 0.001  gradient norm 0.75",
    ]


def test_without_a_terminal_alerts_come_at_once_as_plain_lines() -> None:
    where = console(terminal=False)
    view = LiveView(every=10, console=where)
    view.show(0, step_of(0), [], [])
    view.show(3, step_of(3), [alert("U102", scope="[red]x\x1b[31m")], [])
    view.show(10, step_of(10), [], [])
    text = text_of(where)
    assert "⚠ step 3  " in text
    assert "[red]x\\x1b[31m (update-ratio-high)" in text
    assert "\x1b" not in text
    assert text.splitlines()[-1].endswith("1 warning open")


def test_on_a_terminal_the_picture_holds_numbers_progress_and_alerts(monkeypatch: pytest.MonkeyPatch) -> None:
    where = console(terminal=True)
    now = iter(range(1000))
    monkeypatch.setattr(live.time, "monotonic", lambda: float(next(now)))
    view = LiveView(10, console=where)
    for step in range(10):
        changed = [alert(severity=Severity.CRITICAL)] if step == 8 else []
        view.show(
            step, [*step_of(step, 5.0 - 0.1 * step), block(step, "monitor/update_ratio_median", 1e-3)], changed, []
        )
    view.close()
    text = text_of(where)
    for words in ("step 9/10", "1.0 steps/s", "0:04 left", "4.1", "EMA", "0.75", "0.001", "█", "▁", "1 critical"):
        assert words in text
    assert text.endswith("\x1b[?25h"), "the cursor is back"


def test_a_run_that_ends_early_leaves_neither_a_bar_nor_a_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    monkeypatch.setattr(live.time, "monotonic", lambda: float(next(now)))
    for leave in (True, False):
        where = console(terminal=True)
        view = LiveView(300, console=where, leave=leave)
        for step in range(221):
            view.show(step, step_of(step), [], [])
        shown = len(text_of(where))
        assert "left" in text_of(where)
        view.close()
        end = text_of(where)[shown:]
        assert "left" not in end
        assert "━" not in end
        assert "221 of 300 steps" in end
        erased = end.rpartition("221 of 300 steps")[2].count("\x1b[2K")
        assert (erased > 3) is not leave


def test_redraws_are_few_however_fast_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    where = console(terminal=True)
    clock = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    view = LiveView(1000, console=where)
    drawn: list[str] = []
    monkeypatch.setattr(view, "_picture", lambda: drawn.append("once") or "picture")
    for step in range(1000):
        clock[0] += 0.001
        view.show(step, step_of(step), [], [])
    assert len(drawn) <= 5
    view.close()


def test_a_resolved_alert_leaves_the_count() -> None:
    where = console(terminal=False)
    view = LiveView(every=1, console=where)
    view.show(0, step_of(0), [alert()], [])
    view.show(1, step_of(1), [alert(state=AlertState.RESOLVED)], [])
    assert "open" not in text_of(where).splitlines()[-1]


def test_a_terminal_that_knows_only_ascii_gets_ascii_bars() -> None:
    where = console(terminal=True, encoding="ascii")
    view = LiveView(console=where)
    view.show(0, step_of(0), [], [])
    view.show(1, step_of(1, 5.0), [], [])
    view.close()
    assert "_#" in text_of(where)


def test_closing_a_view_that_never_showed_anything_is_fine() -> None:
    LiveView().close()


def curve_of(values: Iterable[float]) -> np.ndarray:
    """The means that the view keeps of these losses."""
    curve = LossCurve(CHART_BINS, finite_only=False)
    for step, value in enumerate(values):
        curve.append(step, value)
    return curve.points[1]


def test_a_chart_keeps_the_shape_of_a_series_of_any_length() -> None:
    means = curve_of(math.exp(-step / 20_000) for step in range(100_000))
    assert len(means) <= CHART_BINS
    assert bar_chart(means, 8) == "█▇▆▅▄▃▂▁"


def test_a_chart_of_several_rows_has_as_many_times_the_levels() -> None:
    means = curve_of(math.exp(exponent) for exponent in range(16))
    assert bar_chart(means, 16, rows=2).splitlines() == [" " * 8 + "▁▂▃▄▅▆▇█", "▁▂▃▄▅▆▇█" + "█" * 8]


def test_a_chart_draws_what_is_not_finite_as_a_cross() -> None:
    assert bar_chart(curve_of([1.0, math.nan, 2.0, math.inf, -math.inf]), 10) == "▁×█××"


@pytest.mark.parametrize("values", [[], [2.0], [2.0, 2.0], [0.0, -1.0], [math.nan]])
def test_a_chart_of_little_does_not_raise(values: list[float]) -> None:
    assert len(bar_chart(curve_of(values), 10)) == len(values)


@pytest.mark.parametrize(("total_steps", "words"), [(10, "typical late in a run 1e-5 to 1e-4"), (None, None)])
def test_on_a_terminal_the_healthy_band_of_the_update_ratio_is_that_of_the_phase(
    monkeypatch: pytest.MonkeyPatch, total_steps: int | None, words: str | None
) -> None:
    where = console(terminal=True)
    now = iter(range(1000))
    monkeypatch.setattr(live.time, "monotonic", lambda: float(next(now)))
    view = LiveView(total_steps, console=where)
    view.show(9, step_of(9), [], [])
    assert "typical" not in text_of(where), "there is no update ratio yet"
    view.show(9, [*step_of(9), block(9, "monitor/update_ratio_median", 1e-3)], [], [])
    view.close()
    assert (words or "no alerts") in text_of(where)
    assert ("typical" in text_of(where)) == (words is not None)

"""A live view of the run in the terminal; without a terminal, a plain line every few steps."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forewarn.judge.forecast import LossCurve
from forewarn.metrics import label
from forewarn.standing import open_words
from forewarn.types import Action, Alert, AlertState, Block, in_words
from forewarn.views.bands import Rate, phase, update_ratio_words
from forewarn.views.bars import ASCII_BARS, BARS, bar_chart
from forewarn.views.console import News, plain_console, print_lines
from forewarn.views.wording import STYLES

REDRAW_SECONDS = 0.2
"""Minimum time between two redraws, so that the view costs almost nothing."""
CHART_ROWS = 3
CHART_BINS = 512
"""Bins that hold the loss so far: several per column of the widest chart."""

_SHOWN = {
    name: label(name)
    for name in ("train/loss", "train/loss_ema", "train/lr", "gradient/global_norm", "monitor/update_ratio_median")
}


class LiveView:
    """Shows the current loss, learning rate, gradient norm and update ratio, a loss chart, progress and alerts.

    Without a terminal, it prints one line every `every` steps, and alerts as they fire. At the end, the last picture
    stays on the screen unless `leave` is false.
    """

    def __init__(
        self, total_steps: int | None = None, every: int = 50, console: Console | None = None, leave: bool = True
    ) -> None:
        self._console = console or plain_console(stderr=True)
        self._total_steps = total_steps
        self._every = every
        self._leave = leave
        self._is_over = False
        self._news = News()
        self._latest: dict[str, float] = {}
        self._firing: dict[tuple[str, str], Alert] = {}
        self._losses = LossCurve(CHART_BINS, finite_only=False)
        self._rate = Rate()
        self._pace = _Pace()
        self._step = 0
        self._drawn_at = -math.inf
        self._live: Live | None = None

    def show(self, step: int, blocks: Sequence[Block], changed: Sequence[Alert], taken: Sequence[Action]) -> None:
        self._step = step
        for block in blocks:
            if block.name in _SHOWN and len(block.values):
                self._latest[block.name] = float(block.values.max())
            if block.name == "train/lr" and len(block.values):
                self._rate = self._rate.then(self._latest["train/lr"])
            if block.name == "train/loss":
                self._losses.append(step, float(block.values[0]))
        for alert in changed:
            if alert.state is AlertState.FIRING:
                self._firing[alert.identity] = alert
            else:
                self._firing.pop(alert.identity, None)
        print_lines(self._console, self._news.lines(step, blocks, changed, taken))
        if self._console.is_terminal:
            self._redraw()
        elif step % self._every == 0:
            self._console.print(self._line(), soft_wrap=True)

    def close(self) -> None:
        self._is_over = True
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)
            self._live.stop()
            self._live = None

    def _redraw(self) -> None:
        now = time.monotonic()
        if now - self._drawn_at < REDRAW_SECONDS:
            return
        self._drawn_at = now
        self._pace.see(now, self._step)
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=not self._leave)
            self._live.start()
        self._live.update(self._picture(), refresh=True)

    def _line(self) -> str:
        """The same numbers as one line: `step 150/300  loss 2.31  lr 0.001`."""
        of = f"/{self._total_steps}" if self._total_steps else ""
        numbers = [f"{words} {in_words(self._latest[name])}" for name, words in _SHOWN.items() if name in self._latest]
        return "  ".join([f"step {self._step}{of}", *numbers, *([self._alerts()] if self._firing else [])])

    def _picture(self) -> RenderableType:
        numbers = Table.grid(padding=(0, 3, 0, 0))
        cells = [(words, in_words(self._latest.get(name, "–"))) for name, words in _SHOWN.items()]
        for words, _ in cells:
            numbers.add_column(min_width=max(8, len(words)))  # so that columns do not jump when digits come and go
        numbers.add_row(*(Text(words, style="dim") for words, _ in cells))
        numbers.add_row(*(Text(value, style="bold") for _, value in cells))
        options = self._console.options
        width = max(10, min(options.max_width, 100) - 2)
        chart = bar_chart(self._losses.points[1], width, CHART_ROWS, ASCII_BARS if options.ascii_only else BARS)
        worst = max((alert.severity for alert in self._firing.values()), default=None)
        alerts = Text(self._alerts(), style="green" if worst is None else STYLES[worst])
        return Group(self._progress(width), numbers, *self._band(), Text(chart, style="cyan"), alerts)

    def _band(self) -> list[Text]:
        """The healthy update ratio, if the phase of the run is known."""
        now = phase(self._step, self._total_steps, self._rate)
        is_shown = now is not None and "monitor/update_ratio_median" in self._latest
        return [Text(f"update ratio {update_ratio_words(now)}", style="dim")] if is_shown else []

    def _progress(self, width: int) -> RenderableType:
        pace = self._pace.steps_per_second
        speed = f"{pace:.1f} steps/s" if pace else ""
        if not self._total_steps:
            return Text(f"step {self._step}   {speed}")
        num_steps = min(self._step + 1, self._total_steps)
        if self._is_over:  # a progress bar or a remaining time would suggest that training continues
            return Text(f"{num_steps} of {self._total_steps} steps   {speed}")
        remaining = f"{_clock((self._total_steps - num_steps) / pace)} left" if pace else ""
        row = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(self._total_steps, num_steps, width=max(10, width - 50), complete_style="cyan")
        row.add_row(Text(f"step {self._step}/{self._total_steps}"), bar, Text(remaining), Text(speed, style="dim"))
        return row

    def _alerts(self) -> str:
        return open_words(self._firing.values())


class _Pace:
    """Steps per second over the last redraws."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=25)

    def see(self, now: float, step: int) -> None:
        self._seen.append((now, step))

    @property
    def steps_per_second(self) -> float:
        """0 while unknown."""
        if len(self._seen) < 2:
            return 0.0
        (start, first), (end, last) = self._seen[0], self._seen[-1]
        return (last - first) / (end - start) if end > start else 0.0


def _clock(seconds: float) -> str:
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"

"""A stored run on one screen: its verdict, a line for each key series, its alerts, and its layers at the last step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forewarn.judge.checklist import phase_words
from forewarn.judge.diagnosis import has_loss, stored_is_falling
from forewarn.metrics import BUILT_IN, label
from forewarn.standing import RUNNING, UNCERTAIN, alert_words, exit_code, run_state, verdict
from forewarn.store import Run
from forewarn.store.reader import StoredSeries
from forewarn.types import figure
from forewarn.views.bars import BARS, BarScale, course
from forewarn.views.notebook import fired_alerts
from forewarn.views.wording import (
    HEALTHY,
    INFORMATION,
    STYLES,
    AlertGroup,
    advice,
    literal,
    mark,
    model_words,
    short,
    steps_of,
)

LINES = ("train/loss", "eval/loss", "gradient/global_norm", "monitor/update_ratio_median", "train/lr")
"""The series drawn at the top, where the run has them."""
LAYER_METRICS = ("update/ratio", "gradient/norm", "weight/norm", "activation/std", "gain/block")
"""The metrics to choose from for the layers, where the run has them."""
SPEED = "speed/step_seconds"
PACE_STEPS = 50
"""Steps over which the speed is averaged."""
NAME_WIDTH, VALUE_WIDTH = 24, 10
VERDICT_STYLES = ("bold green", "bold yellow", "bold red")
KEYS = "↑↓ choose · enter open · tab other list · m metric · q quit"
KEYS_OPEN = "↑↓ next · esc back · q quit"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the screen shows of a run, read in one go."""

    heading: Text
    standing: Text
    progress: str
    time: str
    """Where the time of a step goes; empty if that is not recorded."""
    lines: dict[str, StoredSeries]
    groups: list[tuple[AlertGroup, bool]]
    """Each kind of alert, most important first, and whether it is a symptom of the one before."""
    layers: dict[str, tuple[int, dict[str, float]]]
    """By metric: the last measured step, and the value of each layer at it, in the order of the model."""
    courses: dict[str, StoredSeries]
    """By metric: the readings so far of the layer that is open."""
    last_step: int


def snapshot(run: Run, open_layer: str | None = None) -> Snapshot:
    """Read the state of a run; of `open_layer`, also the course of every metric."""
    names = set(run.names())
    trees = fired_alerts(run)
    groups = [(group, index > 0) for cause, symptoms in trees for index, group in enumerate([cause, *symptoms])]
    lines = {name: _largest(run, name) for name in LINES if name in names}
    layers = {name: _last(run, name) for name in LAYER_METRICS if name in names}
    of_layer = [name for name in layers if open_layer is not None and open_layer in run.scopes(name)]
    return Snapshot(
        heading=_heading(run),
        standing=_standing(run, groups),
        progress=_progress(run, names),
        time=phase_words(run),
        lines=lines,
        groups=groups,
        layers=layers,
        courses={name: run.series(name, open_layer or "") for name in of_layer},
        last_step=run.last_step or 0,
    )


def _largest(run: Run, name: str) -> StoredSeries:
    """A series of the run; if there is one per optimizer group, the one that goes highest."""
    series = [run.series(name, scope) for scope in run.scopes(name)]
    return max(series, key=lambda one: float(np.max(one.values, initial=-np.inf, where=np.isfinite(one.values))))


def _last(run: Run, name: str) -> tuple[int, dict[str, float]]:
    series = {scope: run.series(name, scope) for scope in run.scopes(name)}
    step = max((int(one.steps[-1]) for one in series.values() if len(one)), default=0)
    return step, {scope: float(one.values[-1]) for scope, one in series.items() if len(one) and one.steps[-1] == step}


def _heading(run: Run) -> Text:
    return Text.assemble((short(str(run.path)), "bold"), "  ", ", ".join(model_words(run.info)))


def _standing(run: Run, groups: Sequence[tuple[AlertGroup, bool]]) -> Text:
    """The verdict in the words of `forewarn check`."""
    alerts = [alert for group, _ in groups for alert in group.alerts]
    is_falling = stored_is_falling(run)
    words = verdict(alerts, is_falling, has_loss=has_loss(run))
    style = "bold yellow" if words in UNCERTAIN else VERDICT_STYLES[exit_code(alerts, is_falling)]
    return Text.assemble((words, style), f": {alert_words(alerts)}")


def _progress(run: Run, names: set[str]) -> str:
    """`running · step 221 of 300 · 15.3 steps/s · 0:05 left`."""
    state, last, planned = _state(run), run.last_step, run.info.hyperparameters.get("total_steps")
    if last is None:
        return f"{state} · no step has been recorded yet"
    total = planned if isinstance(planned, int) and planned > last else None
    words = [state, f"step {last}" if total is None else f"step {last} of {total}"]
    seconds = float(np.median(run.series(SPEED).values[-PACE_STEPS:])) if SPEED in names else math.nan
    if seconds > 0:
        words.append(f"{figure(1 / seconds)} steps/s")
        if total is not None and state == RUNNING:
            words.append(f"{clock((total - last - 1) * seconds)} left")
    return " · ".join(words)


def _state(run: Run) -> str:
    return run_state(run.end[0] if run.end else None, run.updated or run.info.started)


def clock(seconds: float) -> str:
    """`1:02:05`, or `2:05` below an hour."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"


@dataclass(slots=True)
class RunScreen:
    """What is drawn of a snapshot, and what the keys have chosen."""

    shown: Snapshot
    bars: str = BARS
    is_on_layers: bool = False
    is_open: bool = False
    alert: int = 0
    layer: int = 0
    metric: int = 0

    @property
    def metric_name(self) -> str | None:
        names = list(self.shown.layers)
        return names[self.metric % len(names)] if names else None

    @property
    def layer_names(self) -> list[str]:
        return list(self.shown.layers[self.metric_name][1]) if self.metric_name else []

    @property
    def open_layer(self) -> str | None:
        """The layer whose details are open."""
        names = self.layer_names
        return names[min(self.layer, len(names) - 1)] if self.is_open and self.is_on_layers and names else None

    def press(self, key: str) -> None:
        """Take a key: up, down, enter, escape, tab or m."""
        if key in ("up", "down"):
            change = 1 if key == "down" else -1
            if self.is_on_layers:
                self.layer = max(0, min(self.layer + change, len(self.layer_names) - 1))
            else:
                self.alert = max(0, min(self.alert + change, len(self.shown.groups) - 1))
        elif key == "tab":
            self.is_on_layers, self.is_open = not self.is_on_layers, False
        elif key == "m" and self.shown.layers:
            self.metric = (self.metric + 1) % len(self.shown.layers)
        elif key == "enter":
            self.is_open = bool(self.layer_names if self.is_on_layers else self.shown.groups)
        elif key == "escape":
            self.is_open = False

    def picture(self, width: int, height: int | None = None) -> RenderableType:
        """The screen; with a `height`, lists are cut to it around what is chosen."""
        top = [self.shown.heading, self.shown.standing, Text(self.shown.progress, style="dim")]
        top += [Text(f"time per step: {literal(self.shown.time)}", style="dim")] * bool(self.shown.time)
        top.append(Text())
        top += [self._line(name, values, width) for name, values in self.shown.lines.items()]
        top.append(Text())
        if height is None:
            return Group(*top, *self._lists(width, None))
        for line in top:
            line.no_wrap, line.overflow = True, "ellipsis"
        room = max(4, height - len(top) - 1)
        if self.is_open:
            body = self._open_layer(width) if self.is_on_layers else self._open_alert()
        else:
            body = self._lists(width, room)
        keys = Text(KEYS_OPEN if self.is_open else KEYS, style="dim", no_wrap=True, overflow="ellipsis")
        layout = Layout()
        layout.split_column(Layout(Group(*top), size=len(top)), Layout(Group(*body)), Layout(keys, size=1))
        return layout

    def _line(self, name: str, series: StoredSeries, width: int) -> Text:
        room = max(10, width - NAME_WIDTH - VALUE_WIDTH - 1)
        columns = _over_steps(series, self.shown.last_step, room)
        drawn = course(columns, len(columns), BarScale.of(value for value in columns if value is not None), self.bars)
        last = figure(float(series.values[-1])) if len(series) else "–"
        row = Text.assemble((_fit(label(name), NAME_WIDTH), "dim"), (f"{last:>{VALUE_WIDTH - 1}}", "bold"), "  ")
        return row.append(drawn, style="cyan")

    def _lists(self, width: int, room: int | None) -> list[RenderableType]:
        alerts, layers = len(self.shown.groups), len(self.layer_names)
        if room is not None:  # two titles and a blank line; alerts get at most half if there are layers
            room -= 3
            alerts = min(alerts or 1, max(2, room // 2) if layers else room)
            layers = max(0, room - alerts)
        alert, layer = (self.alert, self.layer) if room is not None else (None, None)
        alert, layer = (None, layer) if self.is_on_layers else (alert, None)
        parts: list[RenderableType] = [Text("Alerts", style=_title(alert is not None))]
        if not self.shown.groups:
            parts.append(Text(f"  {HEALTHY} none so far", style="green"))
        for index in _window(len(self.shown.groups), self.alert, alerts):
            parts.append(self._alert_row(index, width, index == alert))
        if self.metric_name is not None:
            step, values = self.shown.layers[self.metric_name]
            scale = BarScale.of(values.values())
            name = BUILT_IN.title(self.metric_name)
            title = f"{name} by layer, step {step}{', log scale' * scale.is_logarithmic}"
            parts += [Text(), Text(title, style=_title(layer is not None))]
            if not scale.is_logarithmic and scale.low > 0:
                scale = BarScale(0.0, scale.high, is_logarithmic=False)  # so that bars compare by their lengths
            for index in _window(len(values), self.layer, layers):
                parts.append(self._layer_row(*list(values.items())[index], scale, width, index == layer))
        return parts

    def _alert_row(self, index: int, width: int, is_chosen: bool) -> Text:
        group, is_symptom = self.shown.groups[index]
        worst = group.worst
        style = STYLES[worst.severity] if group.is_firing else "dim"
        since = min(alert.since for alert in group.alerts)
        when = f"  since step {since}" if group.is_firing else f"  resolved, {steps_of(group.alerts)}"
        sign = mark(worst.severity) if group.is_firing else HEALTHY
        pointer = "›" if is_chosen else " "
        head = f"{pointer} {'  ' * is_symptom}{sign} "
        row = Text(no_wrap=True)
        row.append(f"{pointer} {'  ' * is_symptom}")
        row.append(f"{sign} ", style=style)
        row.append(_fit(group.headline, max(8, width - len(head) - len(when))), style="" if group.is_firing else "dim")
        row.append(when, style="dim")
        return row

    def _layer_row(self, name: str, value: float, scale: BarScale, width: int, is_chosen: bool) -> Text:
        pointer = "›" if is_chosen else " "
        name_width = max(12, width // 2 - 2)
        room = max(8, width - name_width - VALUE_WIDTH - 4)
        filled = 1 + scale.level(value, room) if math.isfinite(value) else 0
        bar = self.bars[-1] * filled if math.isfinite(value) else "× not finite"
        style = "cyan" if math.isfinite(value) else "bold red"
        return Text.assemble(
            f"{pointer} ", _fit(name, name_width), f" {figure(value):>{VALUE_WIDTH - 1}} ", (bar, style), no_wrap=True
        )

    def _open_alert(self) -> list[RenderableType]:
        group, _ = self.shown.groups[min(self.alert, len(self.shown.groups) - 1)]
        worst = group.worst
        sign = mark(worst.severity) if group.is_firing else HEALTHY
        state = "open" if group.is_firing else "resolved"
        where = f", {group.place}" if group.place else ""
        title = Text.assemble((f"{sign} ", STYLES[worst.severity]), (group.headline, "bold"))
        lines = [Text(group.numbers), Text(f"cause: {literal(worst.cause)}" if worst.cause else "")]
        lines.append(Text(f"{worst.name} {worst.code}, {state}, {steps_of(group.alerts)}{where}", style="dim"))
        remedies = Table.grid(padding=(0, 1, 0, 0))
        for rank, remedy in enumerate(worst.remedies[:5], 1):
            remedies.add_row(f"  {rank}.", advice(remedy))
        body = [line for line in lines if line.plain]
        told: list[RenderableType] = [Text(), Text("What to do", style="bold"), remedies] if worst.remedies else []
        return [title, Padding(Group(*body), (0, 0, 0, 2)), *told, Text()]

    def _open_layer(self, width: int) -> list[RenderableType]:
        name = self.open_layer or ""
        lines = [self._line(metric, series, width) for metric, series in self.shown.courses.items()]
        return [Text(short(name), style="bold"), *(lines or [Text(f"{INFORMATION} reading …", style="dim")]), Text()]


def _over_steps(series: StoredSeries, last_step: int, most: int) -> list[float | None]:
    """At most `most` columns from step 0 to the last one, the same for every series.

    A column shows its reading that is furthest from the first of the series, so that no spike is lost, or one that is
    not finite; without a reading, that of the column before.
    """
    width = min(most, last_step + 1)
    columns: list[float | None] = [None] * width
    if not len(series):
        return columns
    indices = np.minimum(series.steps * width // (last_step + 1), width - 1)
    values = series.values.astype(np.float64)
    distance = np.where(np.isfinite(values), np.abs(values - values[0]), np.inf)
    for index in np.lexsort((distance, indices)):  # the last one of each column wins
        columns[indices[index]] = float(values[index])
    for index in range(1, width):
        columns[index] = columns[index - 1] if columns[index] is None else columns[index]
    return columns


def _title(is_chosen: bool) -> str:
    return "bold reverse" if is_chosen else "bold"


def _fit(text: str, width: int) -> str:
    """A text cut or padded to a width."""
    text = literal(text)
    return f"{text[: width - 1]}…" if len(text) > width else text.ljust(width)


def _window(count: int, chosen: int, most: int) -> range:
    """The part of a list to show: `most` rows with the chosen one among them."""
    start = max(0, min(chosen - most // 2, count - most))
    return range(start, min(count, start + most))


def screen_of(run: Run, bars: str = BARS) -> RunScreen:
    """A screen of a run as it is now."""
    return RunScreen(snapshot(run), bars)

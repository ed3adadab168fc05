"""A stored run as a matplotlib figure."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

try:
    import matplotlib  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "matplotlib":  # matplotlib is installed, but one of its dependencies is not
        raise
    raise ModuleNotFoundError("Run.plot needs matplotlib: pip install 'forewarn[plot]'", name="matplotlib") from None
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from forewarn.metrics import catalogue_of
from forewarn.store import Run
from forewarn.store.reader import StoredSeries
from forewarn.types import Severity
from forewarn.views.notebook import fired_alerts, state_words
from forewarn.views.wording import AlertGroup, short

LOSS, AVERAGE, VALIDATION, RATE = "train/loss", "train/loss_ema", "eval/loss", "train/lr"
COLOURS = {Severity.INFO: "#0e7490", Severity.WARNING: "#d97706", Severity.CRITICAL: "#dc2626"}
MOST_NAMED = 4
"""Maximum number of alerts in the legend; all of them have a line."""
MOST_LINES = 4
"""Maximum number of scopes of a metric in the legend."""
_STYLES: dict[str, dict[str, Any]] = {
    LOSS: {"color": "#94a3b8", "linewidth": 0.8, "label": "training"},
    AVERAGE: {"color": "#1d4ed8", "linewidth": 1.8, "label": "moving average"},
    VALIDATION: {"color": "#059669", "linewidth": 1.2, "marker": "o", "markersize": 4, "label": "validation"},
}
_WIDTH, _LOSS_HEIGHT, _PANEL_HEIGHT = 9.0, 3.6, 1.5
"""Inches."""
_WIDEST_TEXT, _WIDEST_LABEL = 90, 30
"""Characters."""
_ORDERS = 20.0
"""Minimum ratio of the highest to the lowest loss for a logarithmic axis."""


class RunFigure(Figure):
    """A figure that notebooks display without pyplot and its global state."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=100)
        return picture.getvalue()


def plot(run: Run, metrics: Sequence[str]) -> RunFigure:
    """See `Run.plot`."""
    panels = [*([RATE] if RATE in run.names() else []), *metrics]
    heights = [_LOSS_HEIGHT, *[_PANEL_HEIGHT] * len(panels)]
    figure = RunFigure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    axes = list(figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0])
    _draw_loss(axes[0], run)
    for panel, name in zip(axes[1:], panels, strict=True):
        _draw_metric(panel, run, name)
    _mark_alerts(axes, fired_alerts(run))
    axes[0].set_title(_plain(f"{run.path.name}: {state_words(run)}"), loc="left", fontsize="medium")
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    for panel in axes:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.get_legend_handles_labels()[1]:
            panel.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _draw_loss(axes: Axes, run: Run) -> None:
    axes.set_ylabel("loss")
    drawn: list[np.ndarray] = []
    for name, style in _STYLES.items():
        for _, series in _series(run, name, only=""):
            axes.plot(series.steps, _finite(series.values), **style)
            drawn.append(series.values[np.isfinite(series.values)])
            if name == LOSS and not np.isfinite(series.values).all():
                broken = series.steps[~np.isfinite(series.values)]
                axes.plot(broken, np.zeros(len(broken)), "x", color=COLOURS[Severity.CRITICAL], markersize=4,
                          transform=axes.get_xaxis_transform(), clip_on=False, label="not finite")  # fmt: skip
    values = np.concatenate(drawn).astype(np.float64) if drawn else np.empty(0)
    if len(values) and values.min() > 0 and values.max() / values.min() >= _ORDERS:
        axes.set_yscale("log")


def _draw_metric(axes: Axes, run: Run, name: str) -> None:
    axes.set_ylabel(_plain("learning rate" if name == RATE else catalogue_of(run.info).label(name)), fontsize="small")
    run.scopes(name)  # raises an error with suggestions for an unknown name
    series_by_scope = dict(_series(run, name))
    others = len(series_by_scope) - MOST_LINES
    for index, (scope, series) in enumerate(series_by_scope.items()):
        label = _plain(f"group {scope}" if name == RATE else scope, _WIDEST_LABEL)
        if index >= MOST_LINES:
            label = f"and {others} more" if index == MOST_LINES else ""
        axes.plot(series.steps, _finite(series.values), linewidth=1.2, label=label if len(series_by_scope) > 1 else "")
    if name == RATE:
        axes.set_ylim(bottom=0)


def _mark_alerts(axes: Sequence[Axes], fired: Sequence[tuple[AlertGroup, Sequence[AlertGroup]]]) -> None:
    """Mark each cause with a line, the most important ones by name, and its symptoms with small marks at the top."""
    for index, (cause, symptoms) in enumerate(fired):
        step, colour = _first_step(cause), COLOURS[cause.worst.severity]
        for panel in axes:
            panel.axvline(step, color=colour, linewidth=1, linestyle=(0, (3, 2)), zorder=0)
        label = _plain(f"step {step}: {cause.worst.name}", _WIDEST_LABEL) if index < MOST_NAMED else None
        _mark(axes[0], step, colour, 7, label)
        for symptom in symptoms:
            _mark(axes[0], _first_step(symptom), COLOURS[symptom.worst.severity], 3.5, None)


def _mark(axes: Axes, step: int, colour: str, size: float, label: str | None) -> None:
    axes.plot([step], [1.0], "v", color=colour, markersize=size, label=label, clip_on=False, linestyle="",
              transform=axes.get_xaxis_transform())  # fmt: skip


def _first_step(group: AlertGroup) -> int:
    return min(alert.fired or 0 for alert in group.alerts)


def _series(run: Run, name: str, only: str | None = None) -> Iterator[tuple[str, StoredSeries]]:
    """The series of a metric by scope; none if the run did not record it."""
    for scope in run.scopes(name) if name in run.names() else ():
        if only is None or scope == only:
            yield scope, run.series(name, scope)


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, math.nan)


def _plain(text: str, most: int = _WIDEST_TEXT) -> str:
    """Wrapped text that matplotlib draws literally: `$` would start a formula, a leading `_` would hide a label."""
    text = "\n".join(textwrap.wrap(short(text), most)).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text

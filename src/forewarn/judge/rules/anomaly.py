"""A rule about any metric that the user names: it is far from its own course, or drifts away from its level."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from forewarn.judge.headlines import Message
from forewarn.judge.registry import finding, rule
from forewarn.judge.remedies import advise, snapshot
from forewarn.judge.series import MAD_TO_STD, Floats, Panel
from forewarn.settings import Settings, between
from forewarn.types import Finding, Severity

CODE = "M104"

_COURSE = 9
"""Readings whose median predicts the next one."""
_LARGEST_FACTOR = 4.0
"""Positive values that differ by more than this factor are compared as logarithms."""
_LEAST_NOISE = 1e-3
"""Noise of a metric at least, as a fraction of its size: a nearly constant metric may vary a little."""
_TIMES_USUAL = 1.5
"""How much further a reading must be than any before: a jump that recurs, as at the start of each epoch, is usual."""
_BLOCK = 5
"""Readings whose median is one level: a metric that wanders has levels further apart than its noise."""
_ALLOWED = 0.5
"""How far outside the range of its levels a reading may be, in widths of that range, before it counts as drift."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """Metrics to watch for anomalies, for `watch(rules=[…])`; made by `forewarn.anomaly`."""

    metrics: tuple[str, ...]


def anomaly(*metrics: str) -> Anomaly:
    """Watch these metrics for anomalies: `watch(rules=[forewarn.anomaly("my/reward", "loader/*")])`.

    Names may be patterns. The rule is `metric-anomaly`, and its limits are in `Config.thresholds`.
    """
    if not metrics or not all(isinstance(metric, str) and "/" in metric for metric in metrics):
        raise ValueError(f"anomaly takes names of metrics, such as 'my/reward' or 'my/*', not {metrics!r}")
    return Anomaly(metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricAnomaly(Settings):
    """When `metric-anomaly` fires."""

    direction: Literal["both", "up", "down"] = "both"
    """Which way is bad."""
    window: int = between(200, 40, counts="readings")
    """Number of newest readings looked at."""
    minimum: int = between(30, 20, counts="readings")
    """Number of earlier readings needed."""
    spread: float = between(8.0, 1.0)
    """How far from its course a reading must be, in standard deviations of the usual noise."""
    lasting: int = between(3, 1, counts="readings")
    """Readings in a row that are a warning; fewer are information."""
    drift: float = between(10.0, 1.0)
    """Sum of the distances of readings from the range of the levels before, in widths of that range, that is drift."""


@rule(
    CODE, "metric-anomaly", reads=("*/*",), per_scope=True, keep=50,
    settings=MetricAnomaly,
    message=(
        Message("{scope} drifts away from its level", "value {value} · limit {bound} · level before {level_before}"),
        Message("{scope} is far from its course", "value {value} · limit {bound} · usual {level}"),
    ),
    remedies=(
        advise("inspect_step", "Find out what changed at step {step}",
               "the data, the learning rate, an evaluation or another alert shortly before it may show why",
               scope_is="metric"),
        snapshot(),
        advise("leave_out", "Take it out of Config(anomalies=...)", "if such values are normal for this metric",
               scope_is="metric"),
    ),
)  # fmt: skip
def metric_anomaly(values: Panel, settings: MetricAnomaly) -> Iterator[Finding]:
    """A metric that you named is far from its own course, or drifts away from its level.

    ## Why is this bad?
    You asked for it: `watch(rules=[forewarn.anomaly("my/reward")])`, or `anomalies = ["my/reward"]` in a config. If no
    metric is named, the rule is off.

    The last nine readings predict the next one, and the usual errors of that prediction are the noise. A reading is far
    if its error is eight times the noise and clearly larger than any before, so a jump that recurs, as at the start of
    each epoch, is usual. One such reading is information, and three in a row are a warning. Values that differ by
    factors are compared as logarithms. A metric that rises or falls all the time follows its course.

    A metric that kept its level and then leaves it, too slowly for that, drifts. This is also a warning (CUSUM).

    ## Example
    fires: my/reward 1.0+0.01x60 9.0
    fires: my/waiting 5.0x20 5.1x20 5.0x20 0.5x3
    fires: my/waiting 5.0x10 5.2x5 4.8x5 5.0x10 5.2x5 4.8x5 5.0x10 5.2x5 4.8x5 5.0+0.02x60
    quiet: my/reward 1.0+0.01x60
    quiet: my/reward 1.0x25 9.0
    """
    for index in np.flatnonzero(np.isfinite(values.last)):
        column = values.values[-settings.window :, index].astype(np.float64)
        readings = column[np.isfinite(column)]
        if len(readings) <= settings.minimum:
            continue
        in_logs = readings.min() > 0 and readings.max() > _LARGEST_FACTOR * readings.min()
        curve = np.log(readings) if in_logs else readings
        seen = _far(curve, settings) or _drifting(curve, settings)
        if seen is not None:
            bound, level = (float(np.exp(value)) if in_logs else value for value in (seen.bound, seen.level))
            named = {"level_before" if seen.drifts else "level": level}
            yield finding(seen.severity, values.last[index], bound, values.scopes[index], **named)


class _Seen(NamedTuple):
    severity: Severity
    bound: float
    level: float
    drifts: bool


def _far(curve: Floats, settings: MetricAnomaly) -> _Seen | None:
    """Whether the newest readings are far from the course before them."""
    earlier, newest = curve[: -settings.lasting], curve[-settings.lasting :]
    if len(earlier) <= _COURSE:
        return None
    predicted = np.median(sliding_window_view(earlier, _COURSE), axis=1)
    errors = earlier[_COURSE:] - predicted[:-1]
    usual = float(np.median(errors))  # of a rising metric, the prediction is always too low
    errors = np.abs(errors - usual)
    reach = max(settings.spread * _noise(errors, curve), _TIMES_USUAL * float(errors.max()))
    slope = usual / ((_COURSE + 1) / 2)
    distances = newest - (predicted[-1] + usual + slope * np.arange(settings.lasting))
    is_far = (_signed(distances, settings) > reach) & (np.sign(distances) == np.sign(distances[-1]))
    if not is_far[-1]:
        return None
    level = float(newest[-1] - distances[-1])
    bound = level + float(np.sign(distances[-1])) * reach
    return _Seen(Severity.WARNING if is_far.all() else Severity.INFO, bound, level, drifts=False)


def _drifting(curve: Floats, settings: MetricAnomaly) -> _Seen | None:
    """Whether the newer half leaves the range that the older half kept, by a cumulative sum."""
    older, newer = np.array_split(curve, 2)
    if len(older) < settings.minimum:
        return None
    level, third = float(np.median(older)), len(older) // 3
    if abs(np.median(older[:third]) - np.median(older[-third:])) > _noise(np.abs(older - level), curve):
        return None
    levels = [np.median(part) for part in np.array_split(older, len(older) // _BLOCK)]
    lowest, highest = float(min(levels)), float(max(levels))
    width = max(highest - lowest, _LEAST_NOISE * float(np.median(np.abs(curve))), 1e-12)
    for sign, bound in ((1.0, highest), (-1.0, lowest)):
        excess = sign * (newer - bound) / width
        total = 0.0
        for value in excess.tolist():
            total = max(0.0, total + value - _ALLOWED)
        if total > settings.drift and _signed(newer[-1:] - level, settings)[0] > 0 and excess[-_BLOCK:].min() > 0:
            return _Seen(Severity.WARNING, bound, level, drifts=True)
    return None


def _noise(errors: Floats, curve: Floats) -> float:
    """The standard deviation behind these absolute errors, if they are mostly noise."""
    return max(MAD_TO_STD * float(np.median(errors)), _LEAST_NOISE * float(np.median(np.abs(curve))), 1e-12)


def _signed(distances: Floats, settings: MetricAnomaly) -> Floats:
    """How far in the bad direction."""
    if settings.direction == "both":
        return np.abs(distances)
    return distances if settings.direction == "up" else -distances


@dataclass(frozen=True, kw_only=True)
class AnomalyThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    metric_anomaly: MetricAnomaly = MetricAnomaly()

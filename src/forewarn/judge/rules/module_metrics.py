"""Rules about the user's own metrics from `watch(metrics=[…])`, whatever they measure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.registry import NO_BOUND, finding, rule
from forewarn.judge.remedies import advise, snapshot, widen_range
from forewarn.judge.series import Bools, Panel
from forewarn.judge.upcoming import NEARLY, Upcoming, any_of
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity, Values

_EVERY = ("*_metric/*",)


def _same_scopes(metric: str, upcoming: Upcoming) -> bool:
    """Whether no scope of the metric is missing in its upcoming readings."""
    return upcoming.history.panel(metric).scopes == upcoming.columns[metric].scopes


def _not_all_finite(metric: str, upcoming: Upcoming) -> Bools | None:
    finite = np.isfinite(upcoming.columns[metric].values)
    return any_of(~finite) if _same_scopes(metric, upcoming) else None


@rule(
    "M101", "non-finite-metric", reads=_EVERY, per_scope=True, keep=50,
    lookahead=lambda _settings, _info: _not_all_finite,
    message=(
        Message("Metric {scope} is NaN or infinite", "value {value} · last finite value {last_finite}"),
        Message("Metric {scope} was never finite", "value {value}"),
    ),
    remedies=(
        advise("inspect_metric", "Check the metric's function for log(0) or division by zero",
               "that is the usual cause, and then the run itself is fine", scope_is="metric"),
        advise("inspect_layer", "Check the weights, inputs and gradients of the layer",
               "if they are not finite either, the layer overflows", scope_is="metric"),
        snapshot(),
    ),
)  # fmt: skip
def non_finite_metric(values: Panel) -> Iterator[Finding]:
    """A metric of yours is NaN or infinite.

    ## Why is this bad?
    Either the function divides by zero or takes the logarithm of zero, or the tensor that it reads is no longer finite.
    A non-finite tensor soon reaches the loss. If a metric never had a finite value, such as the standard deviation of a
    single number, this is only information.

    ## Example
    fires: gradient_metric/norm{layer.weight} 1.0x5 nan
    fires: activation_metric/kurtosis{layer} inf
    quiet: gradient_metric/norm{layer.weight} 1.0-0.1x6
    quiet: gradient_metric/norm{layer.weight} 1.0x5 1e30
    """
    for index in np.flatnonzero(~np.isfinite(values.last)):
        before = values.values[np.isfinite(values.values[:, index]), index]
        severity = Severity.WARNING if len(before) else Severity.INFO
        evidence = {"last_finite": before[-1]} if len(before) else {}
        yield finding(severity, values.last[index], NO_BOUND, values.scopes[index], **evidence)


@rule(
    "M102", "metric-out-of-range", reads=_EVERY, per_scope=True, hold=3, keep=50,
    lookahead=lambda _settings, info: lambda metric, upcoming: (
        any_of(np.logical_or(*_outside(upcoming.columns[metric].values, *_healthy(metric, info))))
    ),
    message=(
        Message("Metric {scope} is out of range", "value {value} · healthy from {low} to {high}"),
        Message("Metric {scope} is out of range", "value {value} · limit {bound}"),
    ),
    remedies=(
        advise("inspect_layer", "Compare the layers: forewarn show RUN --metric '_metric/'",
               "an alert shortly before this one is the likely cause", scope_is="metric"),
        snapshot(),
        widen_range("if the run is fine, healthy=(low, high) of the metric is too narrow"),
    ),
)  # fmt: skip
def metric_out_of_range(values: Panel, metric: str, info: RunInfo) -> Iterator[Finding]:
    """A metric of yours stays outside its healthy range.

    ## Why is this bad?
    You declared the range yourself: `forewarn.GradientMetric("norm", healthy=(0.01, 10))`. The limits themselves are
    healthy, and either may be None. Three readings in a row outside the range are a warning.

    ## Example
    fires: gradient_metric/norm{layer.weight} 1.0x5 20.0x3 | healthy/gradient_metric/norm 0.01 10
    fires: gradient_metric/norm{layer.weight} 1.0x5 0.001x3 | healthy/gradient_metric/norm 0.01 inf
    quiet: gradient_metric/norm{layer.weight} 1.0x5 20.0x2 1.0 20.0 | healthy/gradient_metric/norm 0.01 10
    quiet: gradient_metric/norm{layer.weight} 1.0x5 20.0x3 | healthy/gradient_metric/rms 0.01 10
    """
    low, high = _healthy(metric, info)
    last = values.last
    below, above = _outside(last, low, high)
    declared = {"low": low, "high": high} if np.isfinite([low, high]).all() else {}
    for index in np.flatnonzero(below | above):
        yield finding(Severity.WARNING, last[index], low if below[index] else high, values.scopes[index], **declared)


def _outside(values: Values, low: float, high: float) -> tuple[Bools, Bools]:
    """Which finite values are below and above this range."""
    finite = np.isfinite(values)
    with np.errstate(over="ignore"):  # a limit beyond float32 never applies
        return finite & (values < np.float32(low)), finite & (values > np.float32(high))


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricJump(Settings):
    """When `metric-jump` fires."""

    minimum: int = between(30, 4, counts="readings")
    """Minimum number of earlier readings of a metric in one place; `Config.detail_window` is how many are kept."""
    spans: float = between(5.0, 0.0)
    """Minimum distance from all earlier readings, as a multiple of the range they cover."""
    share: float = between(0.5, 0.0)
    """The same as a fraction of their largest magnitude, so that a nearly constant metric may vary a little."""
    lasting: int = between(2, 1, counts="readings")
    """Readings in a row that must be that far away, on the same side."""


def _upcoming_jumps(metric: str, upcoming: Upcoming, settings: MetricJump) -> Bools | None:
    """Where a scope's newest readings are far outside the range of those before them that are surely in memory."""
    values, num_new = upcoming.joined(metric), len(upcoming.columns[metric].steps)
    if values is None or not _same_scopes(metric, upcoming):
        return None
    num_before = len(values) - num_new - settings.lasting
    if num_before < settings.minimum:
        return None
    rows = values.values[1:].astype(np.float64)
    before = np.lib.stride_tricks.sliding_window_view(rows[: -settings.lasting], num_before, axis=0)
    recent = np.lib.stride_tricks.sliding_window_view(rows[num_before:], settings.lasting, axis=0)
    lowest, highest = np.fmin.reduce(before, axis=-1), np.fmax.reduce(before, axis=-1)
    reach = NEARLY * settings.spans * (highest - lowest)
    inside = np.fmin.reduce(recent, axis=-1) <= highest + reach
    inside &= np.fmax.reduce(recent, axis=-1) >= lowest - reach
    return any_of(~inside)


@rule(
    "M103", "metric-jump", reads=_EVERY, per_scope=True, keep=50,
    lookahead=lambda settings, _info: lambda metric, upcoming: _upcoming_jumps(metric, upcoming, settings),
    settings=MetricJump,
    message=Message("Metric {scope} jumped", "value {value} · before from {lowest_before} to {highest_before}"),
    remedies=(
        advise("inspect_layer", "Find out what changed at step {step}",
               "it may be the data, the learning rate, or a layer that was frozen or replaced", scope_is="metric"),
        advise("declare_range", "Declare a healthy range for this metric",
               "with healthy=(low, high), values outside it become a warning", scope_is="metric"),
    ),
)  # fmt: skip
def metric_jump(values: Panel, settings: MetricJump) -> Iterator[Finding]:
    """A metric of yours suddenly jumped far from all its earlier values.

    ## Why is this bad?
    It may not be: forewarn does not know what the metric means, so this is only information. But a number may stay in
    some range for thirty readings and then be several times that range away, twice in a row. Then something changed at
    that step. Smooth, noisy, rising and bursty metrics all stay near their own range. A metric that has hardly ever
    moved has no such range and does not fire. Afterwards the new level counts as usual.

    ## Example
    fires: activation_metric/kurtosis{layer} 3.0+0.01x40 9.0 9.0
    fires: activation_metric/offset{layer} -0.1+0.01x40 -6.0 -7.0
    quiet: activation_metric/kurtosis{layer} 3.0+0.01x40 9.0 3.4
    quiet: activation_metric/kurtosis{layer} 3.0+0.01x20 9.0 9.0
    quiet: activation_metric/kurtosis{layer} 3.0+0.5x60
    quiet: activation_metric/open_share{layer} 0.0x40 0.3x5
    """
    recent, earlier = values.values[-settings.lasting :], values.values[: -settings.lasting]
    if len(earlier) < settings.minimum:
        return
    lowest, highest = np.fmin.reduce(earlier), np.fmax.reduce(earlier)
    outside = ((recent > highest) | (recent < lowest)).all(axis=0)
    for index in np.flatnonzero(outside & np.isfinite(recent[-1]) & (highest > lowest)):
        low, high, newest = float(lowest[index]), float(highest[index]), recent[:, index].astype(np.float64)
        reach = max(settings.spans * (high - low), settings.share * max(abs(low), abs(high)))
        above = bool((newest > high + reach).all())
        if not above and not (newest < low - reach).all():
            continue
        usual = earlier[np.isfinite(earlier[:, index]), index]
        if len(usual) < settings.minimum or not np.median(np.abs(usual - np.median(usual))) > 0:
            continue
        bound = high + reach if above else low - reach
        yield finding(Severity.INFO, newest[-1], bound, values.scopes[index], lowest_before=low, highest_before=high)


def _healthy(metric: str, info: RunInfo) -> tuple[float, float]:
    """The declared range of a metric, without the suffix from its aggregation."""
    named = [name for name in info.metrics if metric == name or metric.startswith(f"{name}_")]
    return info.metrics[max(named, key=len)] if named else (-np.inf, np.inf)


@dataclass(frozen=True, kw_only=True)
class ModuleMetricThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    metric_jump: MetricJump = MetricJump()

"""Rules about the user's own metrics from `watch(metrics=[…])`, whatever they mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.registry import NO_BOUND, finding, rule
from forewarn.judge.remedies import advise, snapshot, widen_range
from forewarn.judge.series import Panel
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity

_EVERY = ("*_metric/*",)


@rule(
    "M101", "non-finite-metric", reads=_EVERY, per_scope=True, keep=50,
    message=(
        Message(
            "Your metric {scope} is NaN or infinite",
            "{scope} {value} · last finite value {last_finite}",
        ),
        Message("Your metric {scope} has never been a finite number", "{scope} {value}"),
    ),
    remedies=(
        advise("inspect_metric", "Inspect metric", "a logarithm or a division at zero in the metric's own function is the usual cause, "
               "and then the run is well", scope_is="metric"),
        advise("inspect_layer", "Inspect layer", "if its values are not finite either, the layer overflows: the weights, inputs and "
               "gradients there are the place to look", scope_is="metric"),
        snapshot(),
    ),
)  # fmt: skip
def non_finite_metric(values: Panel) -> Iterator[Finding]:
    """Metric of your own that is no longer a finite number.

    ## Why is this bad?
    Either the function divides by zero or takes the logarithm of it, and its series ends where it would have become
    interesting; or what it looks at is no longer finite, which soon reaches the loss. Where a metric never had a finite
    value, as the standard deviation of a single number, it is information.

    ## Example
    fires: gradient_metric/norm{layer.weight} 1.0x5 nan
    fires: activation_metric/kurtosis{layer} inf
    quiet: gradient_metric/norm{layer.weight} 1.0x5 1e30
    """
    for index in np.flatnonzero(~np.isfinite(values.last)):
        before = values.values[np.isfinite(values.values[:, index]), index]
        severity = Severity.WARNING if len(before) else Severity.INFO
        evidence = {"last_finite": before[-1]} if len(before) else {}
        yield finding(severity, values.last[index], NO_BOUND, values.scopes[index], **evidence)


@rule(
    "M102", "metric-out-of-range", reads=_EVERY, per_scope=True, hold=3, keep=50,
    message=(
        Message(
            "Your metric {scope} is outside its healthy range",
            "{scope} {value} · healthy {low} to {high}",
        ),
        Message("Your metric {scope} is outside its healthy range", "{scope} {value} · limit {bound}"),
    ),
    remedies=(
        advise("inspect_layer", "Inspect layer", "you declared what is healthy here: what fired shortly before is the likely reason, "
               "and `forewarn show RUN --metric '_metric/'` has all layers beside this one", scope_is="metric"),
        snapshot(),
        widen_range("if the run is well, the range is too narrow: healthy=(low, high) in the line of the metric"),
    ),
)  # fmt: skip
def metric_out_of_range(values: Panel, metric: str, info: RunInfo) -> Iterator[Finding]:
    """Metric of your own that stays outside the range that you declared healthy.

    ## Why is this bad?
    You said so: `forewarn.GradientMetric("norm", healthy=(0.01, 10))`. The bounds themselves are healthy, and either
    may be None. A single reading outside is nothing, three in a row are a warning.

    ## Example
    fires: gradient_metric/norm{layer.weight} 1.0x5 20.0x3 | healthy/gradient_metric/norm 0.01 10
    fires: gradient_metric/norm{layer.weight} 1.0x5 0.001x3 | healthy/gradient_metric/norm 0.01 inf
    quiet: gradient_metric/norm{layer.weight} 1.0x5 20.0x2 1.0 20.0 | healthy/gradient_metric/norm 0.01 10
    quiet: gradient_metric/norm{layer.weight} 1.0x5 20.0x3 | healthy/gradient_metric/rms 0.01 10
    """
    low, high = _healthy(metric, info)
    last = values.last
    with np.errstate(over="ignore"):  # a bound beyond float32 never applies
        below, above = last < np.float32(low), last > np.float32(high)
    declared = {"low": low, "high": high} if np.isfinite([low, high]).all() else {}
    for index in np.flatnonzero(np.isfinite(last) & (below | above)):
        yield finding(Severity.WARNING, last[index], low if below[index] else high, values.scopes[index], **declared)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricJump(Settings):
    """When `metric-jump` fires."""

    minimum: int = between(30, 4, counts="readings")
    """Readings of a metric at one place before anything is judged; `Config.detail_window` is how many are kept."""
    spans: float = between(5.0, 0.0)
    """How far outside all earlier readings, in units of the whole range that they cover."""
    share: float = between(0.5, 0.0)
    """The same at least, as a share of their largest magnitude: one that hardly varies may vary a little more."""
    lasting: int = between(2, 1, counts="readings")
    """Readings in a row that must lie there, on the same side."""


@rule(
    "M103", "metric-jump", reads=_EVERY, per_scope=True, keep=50,
    settings=MetricJump,
    message=Message("Your metric {scope} jumped", "{scope} {value} · earlier {lowest_before} to {highest_before}"),
    remedies=(
        advise("inspect_layer", "Inspect layer", "what changed at that step: the data, the learning rate, a layer that was frozen or "
               "replaced", scope_is="metric"),
        advise("declare_range", "Declare range", "with healthy=(low, high) in the line of the metric its own bounds are judged, and as "
               "a warning", scope_is="metric"),
    ),
)  # fmt: skip
def metric_jump(values: Panel, settings: MetricJump) -> Iterator[Finding]:
    """Metric of your own that has left all its earlier readings far behind at once.

    ## Why is this bad?
    It may not be: nothing is known of what the metric means, so this is information. But a number that kept within
    some range for thirty readings and is suddenly, twice in a row, several times that range away tells of a step at
    which something changed. Whatever its usual course is, smooth, noisy, rising or in bursts, it stays within reach of
    its own range; one that has hardly ever moved has none, and is left alone. The new level is then taken as usual.

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

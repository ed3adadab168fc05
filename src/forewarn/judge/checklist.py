"""Health checks: signs of a good run, each with its number. If a rule covers the same sign, its alert decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from forewarn.judge.forecast import LossCurve
from forewarn.judge.judgement import RuleSet
from forewarn.judge.remedies import declared
from forewarn.judge.rules.gradients import ExplodingGradient, VanishingGradient
from forewarn.judge.rules.tasks import TaskCollapse
from forewarn.judge.rules.updates import UpdateRatioHigh, UpdateRatioLow
from forewarn.judge.series import Floats, median
from forewarn.standing import HEALTHY, TOO_EARLY, alert_words, exit_code, open_alerts
from forewarn.store import Run
from forewarn.types import Alert, RunInfo, figures, in_words

NO_WARNINGS = "no open warnings"
COVERED = {
    "loss falling": (
        "L101",
        "L102",
        "L103",
        "L104",
        "L105",
        "L106",
        "L107",
        "L108",
        "L109",
        "L110",
        "L111",
        "E102",
        "E106",
        "E107",
    ),
    "gradient norms in range": ("G101", "G102", "G103", "G104", "G107", "G108", "G109", "G112", "G113"),
    "update ratios in range": (
        "U101",
        "U102",
        "U103",
        "U104",
        "U105",
        "U106",
        "U112",
        "U113",
        "U114",
        "U115",
        "U116",
        "U117",
    ),
    "gradients even over depth": ("G105", "G106", "G110", "G111"),
    "tasks even": ("T101", "T102"),
    "throughput stable": ("P101", "P102", "P103", "P106", "P108"),
    "memory stable": ("P104", "P105", "P107"),
}
"""By check: the rules that cover the same sign. While one of them has an open alert, the check does not pass."""
FEWEST_READINGS = 20
"""Minimum number of readings for a trend over the run."""
NUM_LATE = 10
"""Minimum number of recent readings to judge; a tenth of all readings in a long run."""
DEPTH_FACTOR = 100.0
"""Largest allowed ratio between the gradients of the first and the last block."""
DEPTH_CHECKS = 5
"""Number of recent measured steps in the median of that ratio."""
SLOWDOWN = 1.5
"""Largest allowed ratio of the median step time of the second half to that of the first."""
_LEAST_SHARE = 0.005
"""Smallest share of the time of a step that is shown."""
GROWTH = 1.2
"""Largest allowed ratio of the median memory of the second half to that of the first."""


@dataclass(frozen=True, slots=True)
class Check:
    """One point of the checklist."""

    name: str
    state: Literal["pass", "fail", "notice", "unknown", "info"]
    """`fail` only with an open warning, so a healthy run fails no check; `notice` if only the number is unusual.

    `info` is neither good nor bad.
    """
    detail: str
    """The number behind the state, or what is missing."""


def checklist(
    run: Run, rule_set: RuleSet, alerts: Sequence[Alert], curve: LossCurve, is_falling: bool | None
) -> tuple[Check, ...]:
    """Every check, whether or not the run recorded the data for it."""
    firing = open_alerts(alerts)
    checks = (
        _loss_falling(curve, is_falling, _values(run, "train/loss")),
        _off(run, "gradient/global_norm", "gradient norms in range")
        or _gradients_in_range(_lately(run, "gradient/global_norm"), rule_set),
        _off(run, "monitor/update_ratio_median", "update ratios in range")
        or _updates_in_range(_lately(run, "monitor/update_ratio_median"), rule_set),
        _off(run, "gradient/norm", "gradients even over depth") or _even_over_depth(run),
        _throughput_stable(_values(run, "speed/step_seconds")),
        _memory_stable(_values(run, "system/process_memory_bytes")),
        *_tasks_even(run, rule_set),
    )
    notes = (*_time_per_step(run), *_batch_size(run))
    return (*(_judged(check, firing) for check in checks), _no_warnings(alerts), *notes)


def _off(run: Run, metric: str, name: str) -> Check | None:
    """The check, if the run switched its metric off."""
    setting = run.switched_off(metric)
    return Check(name, "unknown", f"off, by {setting}") if setting else None


def _judged(check: Check, firing: Sequence[Alert]) -> Check:
    """The check, overruled by open alerts of the rules that cover the same sign."""
    against = [alert for alert in firing if alert.code in COVERED.get(check.name, ())]
    if not against:
        return check
    names = ", ".join(dict.fromkeys(alert.name for alert in against))
    state: Literal["fail", "notice"] = "fail" if exit_code(against) else "notice"
    return Check(check.name, state, f"{check.detail}; open: {names}")


def _loss_falling(curve: LossCurve, is_falling: bool | None, losses: Floats) -> Check:
    name = "loss falling"
    if len(losses) and not np.isfinite(losses[-1]):
        return Check(name, "notice", f"the last loss is {in_words(float(losses[-1]))}")
    levels = curve.levels
    if not len(levels):
        return _unknown(name, curve.num_losses)
    detail = " → ".join(figures(float(levels[0]), float(levels[-1])))
    if (lowest := in_words(float(levels.min()))) != in_words(float(levels[-1])):
        detail += f", lowest {lowest}"
    if is_falling is None and curve.is_falling is not None:
        return Check(name, "unknown", f"{detail}; not what this run improves")
    return _verdict(name, is_falling is True, detail)


def _gradients_in_range(norm: Floats, rule_set: RuleSet) -> Check:
    low, high = rule_set.settings_of(VanishingGradient).global_norm, rule_set.settings_of(ExplodingGradient).warning
    return _in_range("gradient norms in range", norm, low, high)


def _updates_in_range(ratio: Floats, rule_set: RuleSet) -> Check:
    low, high = rule_set.settings_of(UpdateRatioLow).tensor, rule_set.settings_of(UpdateRatioHigh).median
    return _in_range("update ratios in range", ratio, low, high)


def _in_range(name: str, lately: Floats, low: float, high: float) -> Check:
    if not len(lately):
        return _unknown(name, 0)
    if broken := int((~np.isfinite(lately)).sum()):
        return Check(name, "notice", f"{broken} of the last {len(lately)} readings are not finite")
    level = float(np.median(lately))
    return _verdict(name, low <= level <= high, f"lately {in_words(level)}, range {in_words(low)} to {in_words(high)}")


def _even_over_depth(run: Run) -> Check:
    name = "gradients even over depth"
    if run.info.depth < 2:
        return Check(name, "unknown", "the model has no repeated blocks")
    first, last = (_block_norm(run, block) for block in (run.info.blocks[0], run.info.blocks[-1]))
    checks = min(len(first), len(last), DEPTH_CHECKS)
    if not checks:
        return _unknown(name, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = float(np.median(first[-checks:] / last[-checks:]))
    even = 1 / DEPTH_FACTOR <= ratio <= DEPTH_FACTOR
    if not math.isfinite(ratio):
        return Check(name, "unknown", "the first or the last block has no gradient")
    return _verdict(name, even, f"first block {in_words(ratio)} × the last, range 0.01 to 100")


def _block_norm(run: Run, block: str) -> Floats:
    """The gradient norm of all parameters of a block, over the measured steps."""
    inside = [scope for scope in _scopes(run, "gradient/norm") if scope.startswith(f"{block}.")]
    squares = [_values(run, "gradient/norm", scope) ** 2 for scope in inside]
    shortest = min((len(values) for values in squares), default=0)
    total: Floats = np.sqrt(sum((values[len(values) - shortest :] for values in squares), np.zeros(shortest)))
    return total


def _throughput_stable(seconds: Floats) -> Check:
    name = "throughput stable"
    if len(seconds) < FEWEST_READINGS:
        return _unknown(name, len(seconds))
    before, after = _halves(seconds)
    detail = f"{in_words(1000 * before)} → {in_words(1000 * after)} ms per step"
    return _verdict(name, after <= SLOWDOWN * before, detail)


def _memory_stable(size: Floats) -> Check:
    name = "memory stable"
    if len(size) < FEWEST_READINGS:
        return _unknown(name, len(size))
    before, after = _halves(size)
    return _verdict(name, after <= GROWTH * before, f"{before / 1e6:.0f} → {after / 1e6:.0f} MB")


def _tasks_even(run: Run, rule_set: RuleSet) -> tuple[Check, ...]:
    """How unevenly the tasks pull, over the window of the rules; empty for a single task."""
    name, needed = "tasks even", rule_set.settings_of(TaskCollapse).window
    ratios = {pair: _values(run, "task/ratio", pair) for pair in _scopes(run, "task/ratio")}
    positive = {
        pair: usable for pair, values in ratios.items() if len(usable := values[np.isfinite(values) & (values > 0)])
    }
    if not positive:
        return ()
    means = {pair: float(np.exp(np.log(values[-needed:]).mean())) for pair, values in positive.items()}
    pair = max(means, key=lambda candidate: abs(math.log(means[candidate])))
    detail = f"gradients {pair} {in_words(means[pair])}"
    if len(positive[pair]) <= needed:  # the rules need to see it twice
        so_far = f"{TOO_EARLY} ({len(positive[pair])} of {needed + 1} checks), {detail} so far"
        return (Check(name, "unknown", so_far),)
    return (Check(name, "pass", f"{detail} lately"),)


def _no_warnings(alerts: Sequence[Alert]) -> Check:
    """The verdict on the run as a check: it fails while a warning is open."""
    if exit_code(open_alerts(alerts)):
        return Check(NO_WARNINGS, "fail", alert_words(alerts))
    return _verdict(NO_WARNINGS, exit_code(alerts) == HEALTHY, alert_words(alerts))


def _time_per_step(run: Run) -> tuple[Check, ...]:
    """Where the time of a step goes; empty if the run has no phases."""
    words = phase_words(run)
    return (Check("time per step", "info", words),) if words else ()


def phase_words(run: Run) -> str:
    """`forward 46%, backward 40%, optimizer 14%`: the shares of a step's time; empty if the run has no phases."""
    name = "speed/phase_seconds"
    series = {phase: run.series(name, phase) for phase in _scopes(run, name)}
    seconds = {
        phase: float(np.nansum(np.diff(one.steps, prepend=one.steps[:1] - 1) * one.values))
        for phase, one in series.items()
        if len(one)
    }
    total = sum(seconds.values())
    if not total > 0:
        return ""
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    shares = [f"{phase} {100 * spent / total:.0f}%" for phase, spent in ranked if spent >= _LEAST_SHARE * total]
    return ", ".join(shares)


def _batch_size(run: Run) -> tuple[Check, ...]:
    """The batch size that the gradient noise suggests; empty if the run has no noise scale."""
    scale, passes = _values(run, "gradient/noise_scale"), _values(run, "gradient/backward_passes")
    if not len(scale) or not len(passes):
        return ()
    per_pass, unit = _examples_per_pass(run.info, float(passes[-1])), "examples"
    if per_pass is None:
        per_pass, unit = 1.0, "micro-batches" if passes[-1] > 1 else "batches of yours"
    suggested, present = in_words(float(f"{scale[-1] * per_pass:.2g}")), in_words(per_pass * float(passes[-1]))
    detail = f"gradient noise scale {suggested} {unit}: batches up to about that size are used efficiently"
    return (Check("batch size", "info", f"{detail}; yours is {present}"),)


def _examples_per_pass(info: RunInfo, passes: float) -> float | None:
    """From the declared size of a micro-batch, or of the batch of a whole step."""
    for name, parts in (("micro_batch_size", 1.0), ("batch_size", passes)):
        if (size := declared(info, name)) > 0:
            return size / parts
    return None


def _halves(values: Floats) -> tuple[float, float]:
    """The medians of the first and the second half."""
    middle = len(values) // 2
    return median(values[:middle]), median(values[middle:])


def _scopes(run: Run, name: str) -> tuple[str, ...]:
    return run.scopes(name) if name in run.names() else ()


def _values(run: Run, name: str, scope: str = "") -> Floats:
    if scope not in _scopes(run, name):
        return np.empty(0)
    return run.series(name, scope).values.astype(np.float64)


def _lately(run: Run, name: str) -> Floats:
    """The newest tenth of the readings, at least ten; only the second half, since the start is measured more often.

    If the second half has no readings, this is the last reading of the run.
    """
    if "" not in _scopes(run, name):
        return np.empty(0)
    series = run.series(name)
    num_late = int((series.steps >= (run.last_step or 0) / 2).sum())
    num_newest = max(NUM_LATE, len(series) // 10)
    return series.values[-max(1, min(num_newest, num_late)) :].astype(np.float64)


def _verdict(name: str, good: bool, detail: str) -> Check:
    return Check(name, "pass" if good else "notice", detail)


def _unknown(name: str, readings: int) -> Check:
    return Check(name, "unknown", f"only {readings} reading{'s' * (readings > 1)}" if readings else "no data")

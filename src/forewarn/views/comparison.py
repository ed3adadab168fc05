"""Several stored runs side by side: what differs in their settings, where they part, and how they ended."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forewarn.config import Config
from forewarn.store import Run, StoredSeries
from forewarn.types import Alert, Severity, figures, in_words
from forewarn.views.wording import literal, model_words, short

MOST_RUNS = 10
MOST_LAYERS = 30
LATE = 10
"""Number of readings at the end of a run in a median."""
LAYER_METRICS = ("gradient/norm", "update/ratio", "weight/norm", "activation/std")
_FEWEST = 5
"""Minimum number of readings in a window of the smoothed loss."""
_WIDEST = 101
_PARTS = 20
"""A window of the smoothed loss is this part of the run."""
_TO_SIGMA = 1.4826
"""Makes the median absolute deviation of normal values their standard deviation."""
_CERTAIN = 4.0
"""Minimum difference of two medians of n values, as a multiple of spread / √n: three of their standard errors."""
_SAME = 1e-6
"""Relative difference up to which two losses without any spread count as the same."""

Floats = NDArray[np.float64]


def configuration(run: Run) -> dict[str, Any]:
    """The settings of a run, flat: its hyperparameters, optimizers, and what of forewarn's config is not default."""
    info = run.info
    flat: dict[str, Any] = {"model": info.model, "parameters": info.num_parameters}
    flat |= dict(_flat(info.hyperparameters))
    flat["optimizer"] = ", ".join(info.optimizers)
    for number, group in enumerate(info.groups):
        prefix = "" if len(info.groups) == 1 else f"group {number}."
        flat |= {f"{prefix}{name}": value for name, value in group.items()}
    flat["every"] = info.every
    defaults = {name: _scalar(value) for name, value in _flat(Config().to_dict())}
    for name, value in _flat(run.config):
        if not name.startswith("hyperparameters.") and defaults.get(name) != _scalar(value):
            flat[f"forewarn.{name}"] = value
    return {literal(name): _scalar(value) for name, value in flat.items()}


def environment(run: Run) -> dict[str, Any]:
    """Where a run was trained: versions and device."""
    return {literal(name): _scalar(value) for name, value in {**run.info.versions, "device": run.info.device}.items()}


def compare(runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any]:
    """Runs side by side, as plain values. `names` says how to call them; the others are compared with the first."""
    losses = [_series(run, "train/loss") for run in runs]
    parting, is_identical = _parting(losses, names)
    rows = [_losses(series) for series in losses]
    config, surroundings = _differences(map(configuration, runs)), _differences(map(environment, runs))
    alerts = _alerts(runs)
    sentences = [
        *([f"The runs are identical: every loss of {len(losses[0])} steps is the same."] if is_identical else []),
        *_in_words(config, "setting"),
        *_in_words(surroundings, "part of the environment", "parts of the environment"),
        *([parting["words"]] if parting else []),
        *([] if is_identical or parting else _together(losses)),
        *([] if is_identical else _loss_words(rows, names)),
        *_alert_words(alerts, names),
    ]
    return {
        "runs": [
            {"run": name, "words": " · ".join(model_words(run.info))} for run, name in zip(runs, names, strict=True)
        ],
        "config": config,
        "environment": surroundings,
        "part": parting,
        "identical": is_identical,
        "layers": _layers(runs),
        "alerts": alerts,
        "losses": rows,
        "words": sentences,
    }


def _together(losses: Sequence[StoredSeries]) -> list[str]:
    """How runs that never part compare."""
    sentences: dict[str, None] = {}
    for other in losses[1:]:
        steps, left, right = _common(losses[0], other)
        if not len(steps):
            sentences["The runs have no loss at the same step."] = None
        elif np.array_equal(left, right, equal_nan=True):
            sentences[f"Every loss is the same up to step {steps[-1]}, the last that both have."] = None
        else:
            sentences["The losses never part: their difference stays within the spread of both."] = None
    return list(sentences)


def _differences(settings: Iterator[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The settings that are not the same in all runs."""
    columns = list(settings)
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [{"key": key, "values": [column.get(key) for column in columns]} for key in keys]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def _in_words(rows: Sequence[Mapping[str, Any]], one: str, several: str = "") -> list[str]:
    if not rows:
        return []
    many = f"{len(rows)} {several or one + 's'}" if len(rows) > 1 else f"one {one}"
    some = "; ".join(f"{row['key']} {' | '.join(map(in_words, row['values']))}" for row in rows[:3])
    return [f"They differ in {many}: {some}{'; …' if len(rows) > 3 else ''}."]


def _losses(series: StoredSeries) -> dict[str, float | None]:
    """The first loss, the median of the last ten, and the lowest of any ten in a row."""
    values = series.values.astype(np.float64)
    finite = values[np.isfinite(values)]
    if not len(finite):
        return {"first": None, "last": None, "best": None}
    last = float(np.median(values[-LATE:]))
    return {"first": float(finite[0]), "last": last, "best": float(smoothed(finite, min(LATE, len(finite))).min())}


def _loss_words(rows: Sequence[Mapping[str, float | None]], names: Sequence[str]) -> list[str]:
    ends = [(name, row["last"]) for name, row in zip(names, rows, strict=True) if row["last"] is not None]
    if len(ends) < 2:
        return []
    words = figures(*(value for _, value in ends))
    listed = ", ".join(f"{word} in {short(name)}" for (name, _), word in zip(ends, words, strict=True))
    return [f"The loss ends at {listed} (median of the last {LATE})."]


def _parting(losses: Sequence[StoredSeries], names: Sequence[str]) -> tuple[dict[str, Any] | None, bool]:
    """Where the first of the runs leaves the first run, and whether all losses are the same."""
    first, others = losses[0], losses[1:]
    is_identical = len(first) > 0 and all(
        np.array_equal(first.steps, other.steps) and np.array_equal(first.values, other.values, equal_nan=True)
        for other in others
    )
    partings = [
        (parting, name) for other, name in zip(others, names[1:], strict=True) if (parting := part(first, other))
    ]
    if is_identical or not partings:
        return None, is_identical
    parting, name = min(partings, key=lambda pair: pair[0].step)
    values = figures(parting.first, parting.second)
    words = (
        f"{short(name)} parts from {short(names[0])} at step {parting.step}: loss {values[1]} instead of {values[0]}"
    )
    if math.isfinite(parting.spread):
        words += f", a difference larger than the spread of both ({in_words(parting.spread)})"
    if parting.same_until is not None:
        words += f"; up to step {parting.same_until} every loss is the same"
    return {"step": parting.step, "metric": "train/loss", "words": f"{words}."}, False


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two losses part."""

    step: int
    first: float
    second: float
    """The smoothed losses at that step."""
    spread: float
    """The spread of both losses around their course; NaN if one of them is not finite there."""
    same_until: int | None
    """The last step up to which every loss is the same; None if the first ones differ."""


def part(first: StoredSeries, second: StoredSeries) -> Parting | None:
    """Where the smoothed losses differ by more than the spread of both and stay apart for a whole window.

    Both are smoothed by a running median over a twentieth of the common steps. The spread comes from the median
    absolute deviations from that, in the same window. A loss that is not finite while the other is parts at once.
    """
    steps, left, right = _common(first, second)
    if not len(steps):
        return None
    window = int(np.clip(len(steps) // _PARTS, _FEWEST, _WIDEST))
    differs = np.flatnonzero((left != right) & ~(np.isnan(left) & np.isnan(right)))
    if not len(differs):
        return None
    same_until = int(steps[differs[0] - 1]) if differs[0] else None
    broken = np.flatnonzero(np.isfinite(left) != np.isfinite(right))
    finite = np.flatnonzero(np.isfinite(left) & np.isfinite(right))
    index = _apart(left[finite], right[finite], window) if len(finite) >= window else None
    if index is not None and not (len(broken) and broken[0] < finite[index[0]]):
        at_step, smooth_left, smooth_right, spread = index
        return Parting(int(steps[finite[at_step]]), smooth_left, smooth_right, spread, same_until)
    if len(broken):
        here = broken[0]
        return Parting(int(steps[here]), float(left[here]), float(right[here]), math.nan, same_until)
    return None


def _apart(left: Floats, right: Floats, window: int) -> tuple[int, float, float, float] | None:
    """The first index from which two finite losses stay apart, their smoothed values there, and the spread."""
    smooth_left, smooth_right = smoothed(left, window), smoothed(right, window)
    deviations = (smoothed(np.abs(left - smooth_left), window), smoothed(np.abs(right - smooth_right), window))
    spread = _TO_SIGMA * np.hypot(*deviations) * max(1.0, _CERTAIN / math.sqrt(window))
    is_apart = np.abs(smooth_left - smooth_right) > np.maximum(spread, _SAME * np.abs(smooth_left))
    needed = min(window, len(left))
    run_lengths = np.convolve(is_apart, np.ones(needed, np.int64), "valid")
    lasting = np.flatnonzero(run_lengths == needed)
    if not len(lasting):
        return None
    index = int(lasting[0])
    return index, float(smooth_left[index]), float(smooth_right[index]), float(spread[index])


def smoothed(values: Floats, window: int) -> Floats:
    """The running median of a window around each value; at the ends the window is smaller on one side."""
    if window < 2 or len(values) < 2:
        return values
    half = window // 2
    padded = np.concatenate([np.full(half, np.nan), values, np.full(window - 1 - half, np.nan)])
    views = np.lib.stride_tricks.sliding_window_view(padded, window)
    result = np.empty(len(values))
    inside = slice(half, len(values) - (window - 1 - half))
    if inside.start < inside.stop:
        result[inside] = np.median(views[inside], axis=1)
    edges = [index for index in range(len(values)) if not inside.start <= index < inside.stop]
    for index in edges:
        result[index] = np.nanmedian(views[index])
    return result


def _common(first: StoredSeries, second: StoredSeries) -> tuple[NDArray[np.int64], Floats, Floats]:
    """The readings of both at the steps that both have; of a step recorded twice, the last one counts."""
    columns = [dict(zip(series.steps.tolist(), series.values.tolist(), strict=True)) for series in (first, second)]
    steps = np.array(sorted(columns[0].keys() & columns[1].keys()), np.int64)
    left, right = (np.array([column[step] for step in steps.tolist()], np.float64) for column in columns)
    return steps, left, right


def _layers(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The layers that differ most at the end of the runs, largest differences first."""
    rows: list[dict[str, Any]] = []
    for metric in LAYER_METRICS:
        levels = [_late_levels(run, metric) for run in runs]
        for scope in dict.fromkeys(scope for level in levels for scope in level):
            values = [level.get(scope) for level in levels]
            sizes = [abs(value) for value in values if value is not None and math.isfinite(value) and value]
            ratio = max(sizes) / min(sizes) if len(sizes) > 1 else 1.0
            if ratio > 1:
                rows.append({"scope": scope, "metric": metric, "values": values, "ratio": ratio})
    return sorted(rows, key=lambda row: -row["ratio"])[:MOST_LAYERS]


def _late_levels(run: Run, metric: str) -> dict[str, float]:
    """The median of each layer over the last measured steps."""
    if metric not in run.names():
        return {}
    late = run.steps_of(metric)[-LATE:]
    parts: dict[str, list[NDArray[np.float32]]] = {}
    for piece in run.pieces(metric, int(late[0]), int(late[-1])):
        for scope, values in zip(piece.scopes, piece.values, strict=True):
            parts.setdefault(scope, []).append(values)
    levels = {scope: np.concatenate(values) for scope, values in parts.items()}
    return {scope: float(np.median(values[np.isfinite(values)])) for scope, values in levels.items()
            if np.isfinite(values).any()}  # fmt: skip


def _alerts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Each kind of alert, with the step at which it first fired in each run; those seen first come first."""
    recorded = [[alert for alert in run.alerts() if alert.fired is not None] for run in runs]
    fired = [_first_fired(alerts) for alerts in recorded]
    kinds: dict[str, Alert] = {}
    for column in fired:
        kinds = column | kinds
    rows = [
        {
            "code": literal(code),
            "name": literal(alert.name),
            "headline": literal(alert.headline or alert.name),
            "severity": str(max(alert.severity for alerts in recorded for alert in alerts if alert.code == code)),
            "fired": [column[code].fired if code in column else None for column in fired],
        }
        for code, alert in kinds.items()
    ]
    return sorted(rows, key=lambda row: min(step for step in row["fired"] if step is not None))


def _first_fired(alerts: Sequence[Alert]) -> dict[str, Alert]:
    """The alert of each code that fired first."""
    latest_first = sorted(alerts, key=lambda alert: -(alert.fired or 0))
    return {alert.code: alert for alert in latest_first}


def _alert_words(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Which warnings some runs have and others have not."""
    serious = [row for row in rows if row["severity"] != str(Severity.INFO)]
    if not rows:
        return ["No run has alerts."]
    sentences = []
    for name, column in zip(names, range(len(names)), strict=True):
        alone = [
            f"{row['name']} (step {row['fired'][column]})"
            for row in serious
            if row["fired"][column] is not None and sum(step is not None for step in row["fired"]) == 1
        ]
        if alone:
            sentences.append(f"Only {short(name)} has {', '.join(alone)}.")
    return sentences


def _series(run: Run, name: str) -> StoredSeries:
    if name in run.names() and "" in run.scopes(name):
        return run.series(name)
    return StoredSeries(np.empty(0, np.int64), np.empty(0), np.empty(0, np.float32))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _scalar(value: Any) -> Any:
    """A setting as JSON shows it: lists in one line, text made literal."""
    if isinstance(value, list | tuple):
        return ", ".join(str(_scalar(item)) for item in value)
    if value is None or isinstance(value, bool | int):
        return value
    return float(value) if isinstance(value, float) else literal(str(value))

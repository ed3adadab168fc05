"""Writes a log as a run: its readings under the names of the catalogue, with what rules derive from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forewarn.config import Config
from forewarn.importing.log import Log, LogError, Track
from forewarn.importing.names import EPOCH_LOSS, EVALUATION, LOSS, Place, naming_of
from forewarn.judge.stored_steps import judged_steps
from forewarn.measure.loss_course import STEPS_PER_LEVEL, LossCourse
from forewarn.metrics import catalogue_of
from forewarn.standing import IMPORTED
from forewarn.store import RunWriter, open_run
from forewarn.types import Block, RuleInfo, RunInfo, gap, improvement

NOTE = "note"
"""The kind of event that holds what a person should know about a log."""
_DECAY = 0.99
"""The decay of `train/loss_ema` per step."""
_LEAST_PER_LEVEL = 4
"""Minimum number of losses in a level: the median of fewer does not stand an outlier."""
_MOST_LEVELS = 128
"""A log with more levels than this has more losses in each, up to the usual number: they are less noisy then."""
_EPOCH = ("epoch", "train/epoch", "epochs")
_MOST_FILLED = 4
"""How many times the readings of a metric may become with those that its log left out."""
_NEAR = 1e-3
"""How far an epoch may be from a whole number at its end."""
_ROWS_PER_FLUSH = 2_000

_Steps = NDArray[np.int64]
_Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """What became of a log."""

    path: Path
    tool: str
    num_steps: int
    num_readings: int
    names: Mapping[str, Place]
    """What each of its names was taken for."""
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Course:
    """The readings of one metric and scope, each step once, in order."""

    place: Place
    steps: _Steps
    times: _Numbers
    values: NDArray[np.float32]

    @property
    def cadence(self) -> float:
        """The median number of steps between readings; 1 if there are fewer than two."""
        return float(np.median(np.diff(self.steps))) if len(self.steps) > 1 else 1.0


def import_log(
    log: Log,
    to: Path,
    given: Mapping[str, str] | None = None,
    *,
    judge: bool = True,
    tell: Callable[[int, int], None] = lambda _done, _total: None,
) -> ImportedRun:
    """Write a log as a new run at `to`. `given` are the user's answers for names, such as `{"nll": "train/loss"}`.

    With `judge`, its alerts are recorded as if it had been watched, for views that do not judge again.
    Raises LogError if the log has no readings, or an answer cannot be used.
    """
    if not log.tracks:
        raise LogError("it has no readings")
    naming = naming_of(log, given or {})
    notes = [*log.notes, *naming.notes]
    courses = [
        _course(track, naming.places[name], notes) for name, track in log.tracks.items() if name in naming.places
    ]
    info, config = _known_by_forewarn(log)
    info = dataclasses.replace(info, **_facts(courses, log))
    courses += _derived(courses, log, info)
    rows = _rows(courses)
    if not rows.num_steps:
        raise LogError("it has no readings")
    rule_set = config.rule_set()
    rules = tuple(RuleInfo(rule.code, rule.name) for rule in rule_set.rules) if judge else ()
    writer = RunWriter(to, info=dataclasses.replace(info, rules=rules), config=config.to_dict())
    for note in notes:
        writer.event(NOTE, text=note)
    try:
        for index, (step, blocks) in enumerate(rows):
            writer.append(step, blocks)
            if index % _ROWS_PER_FLUSH == _ROWS_PER_FLUSH - 1:
                writer.flush()
                tell(index, rows.num_steps)
        if judge:
            writer.flush()
            with open_run(to) as run:
                for alert in judged_steps(run, rule_set).alerts:
                    writer.record(alert.last, alerts=[alert])
    finally:
        writer.close(IMPORTED)
    if writer.failure:
        raise OSError(writer.failure)
    return ImportedRun(to, log.tool, rows.num_steps, sum(map(len, log.tracks.values())), naming.places, tuple(notes))


def _course(track: Track, place: Place, notes: list[str]) -> _Course:
    """A track with each step once: of a step logged twice, the last reading counts.

    Where the log goes back to an earlier step, the run was resumed there, and what it had logged beyond is replaced.
    """
    steps, times = np.array(track.steps, np.int64), np.array(track.times, np.float64)
    values = np.array(track.values, np.float64) * place.factor
    if (np.diff(steps) <= 0).any():
        following = np.minimum.accumulate(steps[::-1])[::-1]
        kept = np.append(steps[:-1] < following[1:], True)
        if (np.diff(steps) < 0).any():
            back = int(steps[1:][np.diff(steps) < 0][0])
            note = f"it goes back to step {back}, as a resumed run does: what it had logged beyond was replaced"
            if not any(" as a resumed run does" in other for other in notes):
                notes.append(note)
        steps, times, values = steps[kept], times[kept], values[kept]
    with np.errstate(over="ignore"):
        return _Course(place, steps, times, values.astype(np.float32))


def _known_by_forewarn(log: Log) -> tuple[RunInfo, Config]:
    """What forewarn itself wrote beside the log about model and settings; otherwise nothing and the defaults."""
    facts, config = log.facts.get("facts"), log.facts.get("config")
    if not isinstance(facts, dict) or not isinstance(config, dict):
        return RunInfo(), Config()
    try:
        return RunInfo.from_json(facts), Config.from_stored(config)
    except (TypeError, ValueError) as error:
        log.note(f"what forewarn knew of the model cannot be read ({error})")
        return RunInfo(), Config()


def _facts(courses: Sequence[_Course], log: Log) -> dict[str, Any]:
    """The facts that the log itself shows."""
    loss = next((course for course in courses if course.place == Place(LOSS)), None)
    first_step = int(loss.steps[0]) if loss is not None and len(loss.steps) else 0
    if loss is not None and first_step > max(1.0, loss.cadence):  # what came before is missing
        first_step = 0
    times = [float(time) for course in courses for time in course.times[:1] if math.isfinite(time)]
    facts: dict[str, Any] = {
        "imported_from": log.tool, "first_step": first_step, "step_is_epoch": log.step_is_epoch,
        "started": min(times, default=0.0),
    }  # fmt: skip
    return facts | ({} if log.facts else {"hyperparameters": log.hyperparameters})


def _derived(courses: Sequence[_Course], log: Log, info: RunInfo) -> list[_Course]:
    """The readings that a watched run records about its losses, as far as the log does not have them."""
    by_metric = {course.place.metric: course for course in courses}
    loss = by_metric.get(LOSS)
    derived: dict[str, list[tuple[int, float, float]]] = {}
    cadence = 1.0
    if loss is not None:
        cadence = max(1.0, loss.cadence)
        of_levels = _losses_per_level(len(loss.steps), cadence)
        course = LossCourse(_DECAY**cadence, of_levels)
        for step, time, value in zip(loss.steps.tolist(), loss.times.tolist(), loss.values.tolist(), strict=True):
            for metric, number in course.add(value).items():
                derived.setdefault(metric, []).append((step, time, number))
    evaluation = by_metric.get(EVALUATION)
    if evaluation is not None and "evaluation/epoch" not in by_metric:
        for metric, step, time, number in _epochs(evaluation, loss, by_metric.get(EPOCH_LOSS), log, info):
            derived.setdefault(metric, []).append((step, time, number))
    return [
        _Course(Place(metric), *_columns(readings)) for metric, readings in derived.items() if metric not in by_metric
    ]


def _losses_per_level(num_losses: int, cadence: float) -> int:
    """The number of losses in a level: those of 32 steps, but enough for a median, and more in a long log."""
    wanted = max(math.ceil(STEPS_PER_LEVEL / cadence), num_losses // _MOST_LEVELS, _LEAST_PER_LEVEL)
    return min(wanted, STEPS_PER_LEVEL)


def _epochs(
    evaluation: _Course, loss: _Course | None, epoch_loss: _Course | None, log: Log, info: RunInfo
) -> Iterator[tuple[str, int, float, float]]:
    """What `monitor.end_epoch` records, at each evaluation that ends an epoch."""
    ends = _ends_of_epochs(evaluation, log)
    before, last_end = math.nan, -1
    follows_every_step = loss is not None and loss.cadence == 1 and not info.start_is_averaged
    course = LossCourse()
    for number, index in enumerate(ends, 1):
        step, time = int(evaluation.steps[index]), float(evaluation.times[index])
        validation = float(evaluation.values[index])
        train = _at(epoch_loss, step) if epoch_loss is not None else math.nan
        if math.isnan(train) and loss is not None:
            inside = loss.values[(loss.steps > last_end) & (loss.steps <= step)]
            inside = inside[np.isfinite(inside)]
            train = float(np.float32(inside.astype(np.float64).mean())) if len(inside) else math.nan
        course.begin_epoch()
        if loss is not None and follows_every_step:
            for value in loss.values[(loss.steps > last_end) & (loss.steps <= step)].tolist():
                course.add(value)
        readings = {
            "evaluation/epoch": float(number),
            EPOCH_LOSS: train,
            "evaluation/improvement_rate": improvement(before, validation),
            "evaluation/train_val_gap": gap(train, validation),
        }
        if follows_every_step and math.isfinite(course.end):
            readings |= {
                "evaluation/start_loss": course.start,
                "evaluation/end_loss": course.end,
                "evaluation/peak_loss": course.peak,
            }
        if math.isfinite(validation):
            before = validation
        last_end = step
        for metric, value in readings.items():
            if not math.isnan(value):
                yield metric, step, time, value


def _ends_of_epochs(evaluation: _Course, log: Log) -> list[int]:
    """The evaluations that end an epoch. Without a count of epochs there are none: evaluations may be much closer."""
    if log.step_is_epoch:
        return list(range(len(evaluation.steps)))
    track = next((track for name, track in log.tracks.items() if name.lower() in _EPOCH), None)
    if track is None:
        return []
    order = np.argsort(np.array(track.steps, np.int64), kind="stable")
    steps, epochs = np.array(track.steps, np.int64)[order], np.array(track.values)[order]
    places = np.searchsorted(steps, evaluation.steps, side="right") - 1
    counted = np.where(places >= 0, epochs[places], np.nan)
    if not np.isfinite(counted).all():
        return []
    if (epochs == np.round(epochs)).all():  # the epoch that runs: the last evaluation in each ends it
        return np.flatnonzero(np.append(np.diff(counted) != 0, True)).tolist()
    return np.flatnonzero((np.abs(counted - np.round(counted)) < _NEAR) & (counted > _NEAR)).tolist()


def _at(course: _Course, step: int) -> float:
    """The reading at a step; NaN if there is none."""
    index = int(np.searchsorted(course.steps, step))
    is_there = index < len(course.steps) and course.steps[index] == step
    return float(course.values[index]) if is_there else math.nan


def _columns(readings: Sequence[tuple[int, float, float]]) -> tuple[_Steps, _Numbers, NDArray[np.float32]]:
    steps, times, values = zip(*readings, strict=True)
    return np.array(steps, np.int64), np.array(times, np.float64), np.array(values, np.float32)


@dataclass(slots=True)
class _Rows:
    """All courses step by step, each step as blocks in the order of the catalogue."""

    courses: Sequence[_Course]
    steps: _Steps
    bounds: _Steps
    """Where the readings of each step begin, and where the last ones end."""
    owners: _Steps
    times: _Numbers
    values: NDArray[np.float32]
    _layouts: dict[bytes, list[tuple[str, tuple[str, ...], int, int]]] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[tuple[int, list[Block]]]:
        for index, step in enumerate(self.steps.tolist()):
            first, end = int(self.bounds[index]), int(self.bounds[index + 1])
            owners = self.owners[first:end]
            layout = self._layouts.get(owners.tobytes())
            if layout is None:
                layout = self._layouts[owners.tobytes()] = self._layout(owners.tolist())
            known_times = self.times[first:end][np.isfinite(self.times[first:end])]
            time = float(known_times.min()) if len(known_times) else math.nan
            values = self.values[first:end]
            yield step, [Block(step, time, name, scopes, values[start:stop]) for name, scopes, start, stop in layout]

    def _layout(self, owners: list[int]) -> list[tuple[str, tuple[str, ...], int, int]]:
        layout: list[tuple[str, tuple[str, ...], int, int]] = []
        start = 0
        while start < len(owners):
            metric, stop = self.courses[owners[start]].place.metric, start
            while stop < len(owners) and self.courses[owners[stop]].place.metric == metric:
                stop += 1
            scopes = tuple(self.courses[owner].place.scope for owner in owners[start:stop])
            layout.append((metric, scopes, start, stop))
            start = stop
        return layout


def _aligned(courses: Sequence[_Course]) -> list[_Course]:
    """The courses so that all scopes of a metric have the same steps; NaN where a log left one out, as many do NaN.

    A metric whose scopes hardly share a step stays as it is: filling it up would take far more memory than the log.
    """
    members: dict[str, list[_Steps]] = {}
    for course in courses:
        members.setdefault(course.place.metric, []).append(course.steps)
    unions: dict[str, _Steps] = {}
    for metric, steps in members.items():
        union = np.unique(np.concatenate(steps)) if len(steps) > 1 else steps[0]
        if len(union) * len(steps) <= _MOST_FILLED * sum(map(len, steps)):
            unions[metric] = union
    aligned = []
    for course in courses:
        union = unions.get(course.place.metric, course.steps)
        if len(union) > len(course.steps):
            places = np.searchsorted(union, course.steps)
            times, values = np.full(len(union), np.nan), np.full(len(union), np.nan, np.float32)
            times[places], values[places] = course.times, course.values
            course = _Course(course.place, union, times, values)
        aligned.append(course)
    return aligned


def _rows(courses: Sequence[_Course]) -> _Rows:
    order = {metric.name: place for place, metric in enumerate(catalogue_of(RunInfo()).metrics)}
    ranked = sorted(
        _aligned(courses), key=lambda course: (order.get(course.place.metric, len(order)), course.place.metric)
    )
    steps = np.concatenate([course.steps for course in ranked])
    owners = np.repeat(np.arange(len(ranked)), [len(course.steps) for course in ranked])
    sequence = np.lexsort((owners, steps))
    distinct, starts = np.unique(steps[sequence], return_index=True)
    return _Rows(
        ranked,
        distinct,
        np.append(starts, len(sequence)),
        owners[sequence],
        np.concatenate([course.times for course in ranked])[sequence],
        np.concatenate([course.values for course in ranked])[sequence],
    )

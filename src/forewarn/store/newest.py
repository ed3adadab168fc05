"""The newest readings of a run as a whole and its open alerts: what somebody who watches many runs asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from forewarn.catalogue import Catalogue, Scope
from forewarn.codec import Noun
from forewarn.files import read_regular
from forewarn.store.plain import decoded
from forewarn.types import Alert, Severity, Values

OF_THE_RUN = frozenset(
    {
        Scope.RUN, Scope.MODEL, Scope.MONITOR, Scope.GROUP, Scope.OPTIMIZER, Scope.TASK, Scope.TASK_PAIR, Scope.PHASE,
        Scope.RANK,
    }
)  # fmt: skip
"""Scopes of which a run has few."""
TOP_METRICS = ("gradient/norm", "update/ratio")
"""Metrics of single tensors of which the largest are kept."""
TOP = 5
MOST_SCOPES, MOST_METRICS, MOST_ALERTS, LONGEST_SCOPE = 64, 200, 50, 200
MOST_BYTES = 1 << 19
"""Maximum size of the file that holds a summary and this."""


@dataclass(frozen=True, slots=True)
class OpenAlert(Noun):
    """What identifies an open alert."""

    code: str
    name: str
    scope: str
    severity: Severity


@dataclass(frozen=True, slots=True)
class Newest(Noun):
    """The newest reading of each metric, by scope, and the open alerts, worst first."""

    readings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    alerts: tuple[OpenAlert, ...] = ()
    """The worst of them, up to a limit."""
    num_open: Mapping[str, int] = field(default_factory=dict)
    """All open alerts by severity."""


def newest_of(readings: Mapping[str, Mapping[str, float]], firing: Iterable[Alert]) -> Newest:
    worst_first = sorted(firing, key=lambda alert: (-alert.severity, alert.since))
    counts = {str(severity): 0 for severity in Severity}
    for alert in worst_first:
        counts[str(alert.severity)] += 1
    alerts = [
        OpenAlert(alert.code, alert.name, alert.scope[:LONGEST_SCOPE], alert.severity)
        for alert in worst_first[:MOST_ALERTS]
    ]
    return Newest(readings, tuple(alerts), counts)


class NewestReadings:
    """Keeps the newest reading of each metric of a run as a whole, and the largest of a few metrics of its tensors."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._readings: dict[str, Mapping[str, float]] = {}

    def take(self, name: str, scopes: tuple[str, ...], values: Values) -> None:
        """Add readings. A metric may come in parts, each with other scopes."""
        if name not in self._readings and len(self._readings) >= MOST_METRICS:
            return
        selected = self._selected(name, scopes, values)
        earlier = self._readings.get(name, {})
        if name in TOP_METRICS or selected.keys() == earlier.keys():
            self._readings[name] = selected
        elif selected:
            self._readings[name] = dict(list({**earlier, **selected}.items())[:MOST_SCOPES])

    def readings(self) -> Mapping[str, Mapping[str, float]]:
        return {name: values for name, values in self._readings.items() if values}

    def _selected(self, name: str, scopes: tuple[str, ...], values: Values) -> Mapping[str, float]:
        if name in TOP_METRICS:
            finite = np.flatnonzero(np.isfinite(values))
            largest = finite[np.argsort(-values[finite], kind="stable")[:TOP]]
            return {scopes[place]: float(values[place]) for place in largest.tolist()}
        metric = self._catalogue.find(name)
        if scopes != ("",) and (metric is None or metric.scope not in OF_THE_RUN):
            return {}
        return dict(zip(scopes[:MOST_SCOPES], values[:MOST_SCOPES].tolist(), strict=True))


def kept_newest(file: Path) -> Newest:
    """What the writer of a run kept beside its summary; empty if there is none.

    It may be half a second older than the run, which costs less than opening the database.
    """
    try:
        return Newest.from_json(decoded(read_regular(file, MOST_BYTES).decode())["newest"])
    except (KeyError, OSError, OverflowError, RecursionError, TypeError, ValueError):
        return Newest()

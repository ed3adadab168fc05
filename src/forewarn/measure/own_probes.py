"""Checks the user's own probes before training starts, and their readings while it runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from forewarn.catalogue import Metric
from forewarn.measure.probe import Histograms, Probe, Reading
from forewarn.metrics import BUILT_IN


def check_probes(own: Any, built_in: Collection[str]) -> tuple[Metric, ...]:
    """The metrics that these probes declare; raises TypeError or ValueError for a probe that cannot be used."""
    if isinstance(own, str | Probe) or not isinstance(own, Sequence):
        raise TypeError(f"probes must be a list of probes, not {own!r}; put it in brackets: probes=[...]")
    names = set(built_in)
    metrics: dict[str, Metric] = {}
    for probe in own:
        if isinstance(probe, type) or not isinstance(probe, Probe):
            raise TypeError(f"probes must hold instances of subclasses of forewarn.Probe, not {probe!r}")
        kind = type(probe).__name__
        if not isinstance(probe.name, str) or not probe.name:
            raise ValueError(f"{kind} has no name; add one to the class, such as name = 'loader'")
        if probe.name in names:
            raise ValueError(f"a probe named {probe.name!r} already exists; give {kind} another name")
        names.add(probe.name)
        for metric in _declared(probe):
            if metric.family in BUILT_IN.families:
                raise ValueError(
                    f"{kind} records {metric.name!r}, but the monitor itself uses the family {metric.family!r}; choose "
                    f"another, such as {probe.name}/{metric.name.partition('/')[2]}"
                )
            if metric.name in metrics:
                raise ValueError(f"the metric {metric.name!r} of {kind} already exists; give it another name")
            metrics[metric.name] = metric
    return tuple(metrics.values())


def _declared(probe: Probe) -> Sequence[Metric]:
    metrics = probe.metrics
    if not isinstance(metrics, Sequence) or not all(isinstance(metric, Metric) for metric in metrics):
        raise TypeError(
            f"{type(probe).__name__}.metrics must be a list of the forewarn.Metric objects it records, not {metrics!r}"
        )
    return metrics


def checked_readings(probe: Probe, readings: Iterable[Reading | Histograms]) -> Iterator[Reading | Histograms]:
    """The readings of a user's probe; raises ValueError if one is undeclared or its values do not match its scopes."""
    for reading in readings:
        if not any(fnmatchcase(reading.name, metric.name) for metric in probe.metrics or ()):
            raise ValueError(f"it recorded {reading.name!r}, which is not one of the metrics it declares")
        if not isinstance(reading.scopes, tuple):
            raise ValueError(f"the scopes of {reading.name!r} must be a tuple of names, not {reading.scopes!r}")
        if isinstance(reading, Reading):
            np.asarray(reading.values, np.float64).reshape(len(reading.scopes))
        yield reading

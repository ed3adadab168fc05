"""Whether a fault did harm, and when: a run is compared with its healthy twin."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

import numpy as np

from forewarn.lab.faults.cases import Record

SPREADS = 3.0
"""Harm is a score worse than the twin's by more than this many standard deviations over seeds."""
LEAST_SPREAD = 0.01
"""Least spread, as a fraction of the mean score: seeds that agree by luck must not make every fault harmful."""
SMOOTHED = 10
"""Steps over which the objective is averaged before two runs are compared."""


class Twins:
    """The healthy runs of each workload."""

    def __init__(self, records: Iterable[Record]) -> None:
        plain = [record for record in records if record.case.is_plain]
        self._twin = {(record.case.workload, record.case.seed): record for record in plain}
        scores: dict[str, list[float]] = {}
        for record in plain:
            scores.setdefault(record.case.workload, []).append(record.score)
        self.spread: Mapping[str, float] = {
            name: max(statistics.stdev(values), LEAST_SPREAD * abs(statistics.mean(values)))
            for name, values in scores.items()
            if len(values) > 1
        }
        """Standard deviation of the score over seeds, by workload."""

    def of(self, record: Record) -> Record | None:
        """The same script with the same seed and nothing wrong; None if it did not run."""
        return self._twin.get((record.case.workload, record.case.seed))

    def is_harmful(self, record: Record, score: float | None = None) -> bool:
        """Whether the run, or the same case with another score, is worse than its twin by more than chance."""
        twin, score = self.of(record), record.score if score is None else score
        spread = self.spread.get(record.case.workload)
        if twin is None or spread is None:
            raise LookupError(f"{record.case.key} has no healthy twin, or its workload only one healthy run")
        return score - twin.score > SPREADS * spread

    def damage(self, record: Record) -> int | None:
        """The first step from which the smoothed objective stays worse than the twin's by more than chance."""
        twin = self.of(record)
        if twin is None:
            return None
        length = min(len(record.objective), len(twin.objective))
        if length < 2 * SMOOTHED:
            return None
        broken, healthy = (_smoothed(one.objective[:length]) for one in (record, twin))
        noise = float(np.std(np.diff(np.asarray(twin.objective[:length], float)))) / math.sqrt(2 * SMOOTHED)
        worse = ~(broken - healthy <= SPREADS * noise)
        if not worse[-1]:
            return None
        better = np.flatnonzero(~worse)
        return int(better[-1]) + 1 if len(better) else 0


def _smoothed(values: Iterable[float]) -> np.ndarray:
    """The mean of the last values at each step; values that are not finite count as very large."""
    series = np.nan_to_num(np.asarray(list(values), float), nan=1e30, posinf=1e30, neginf=-1e30)
    sums = np.cumsum(np.concatenate([[0.0], series]))
    ends = np.arange(1, len(series) + 1)
    starts = np.maximum(ends - SMOOTHED, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))

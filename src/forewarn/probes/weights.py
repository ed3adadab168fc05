"""Statistics of every weight tensor after the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from forewarn.probes.parameters import Roster
from forewarn.probes.probe import ONE, Array, Pending, Probe, Reading
from forewarn.stats import COLUMNS, measure, summarize


class WeightProbe(Probe):
    """`weight/…` per tensor and `weight/global_norm`, on measured steps."""

    name = "weights"

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def collect(self, measured: bool) -> Pending | None:
        if not measured:
            return None
        names, measured_now = self._roster.names, measure(self._roster.parameters)

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            rows = in_order(measured_now.order, arrays)
            for quantity, values in summarize(rows).items():
                yield Reading(f"weight/{quantity}", names, values)
            yield Reading("weight/global_norm", ONE, np.sqrt(np.nansum(rows[:, 2])))

        return Pending(measured_now.rows, decode)


def in_order(order: Sequence[int], arrays: Sequence[Array]) -> Array:
    """Rows as `measure` gave them, back in the order of the tensors that it was given."""
    if len(arrays) == 1 and order == range(len(order)):
        return arrays[0]
    rows = np.empty((len(order), len(COLUMNS)))
    rows[list(order)] = np.concatenate(arrays) if arrays else rows
    return rows

"""Statistics of every weight tensor after the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from forewarn.probes.parameters import Roster
from forewarn.probes.probe import ONE, Array, Pending, Probe, Reading
from forewarn.probes.updates import UpdateProbe
from forewarn.stats import in_order, measure, summarize


class WeightProbe(Probe):
    """`weight/…` per tensor and `weight/global_norm`, on measured steps."""

    name = "weights"

    def __init__(self, roster: Roster, updates: UpdateProbe) -> None:
        self._roster = roster
        self._updates = updates

    def collect(self, measured: bool) -> Pending | None:
        if not measured:
            return None
        weights, self._updates.weights = self._updates.weights or self._roster.parameters, None
        names, measured_now = self._roster.names, measure(weights)

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            rows = in_order(measured_now.order, arrays)
            for quantity, values in summarize(rows).items():
                yield Reading(f"weight/{quantity}", names, values)
            yield Reading("weight/global_norm", ONE, np.sqrt(np.nansum(rows[:, 2])))

        return Pending(measured_now.rows, decode)

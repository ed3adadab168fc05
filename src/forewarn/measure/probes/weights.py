"""Statistics of every weight tensor after the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probe import ONE, Array, Histograms, Pending, Probe, Reading
from forewarn.measure.probes.updates import UpdateProbe
from forewarn.measure.tensor_reader import TensorReader


class WeightProbe(Probe):
    """`weight/…` per tensor, with histograms if `reader` takes them, and `weight/global_norm`, on measured steps."""

    name = "weights"

    def __init__(self, parameter_index: ParameterIndex, updates: UpdateProbe, reader: TensorReader) -> None:
        self._parameter_index = parameter_index
        self._updates = updates
        self._reader = reader

    def collect(self, measured: bool) -> Pending | None:
        if not measured:
            return None
        weights, self._updates.weights = self._updates.weights or self._parameter_index.parameters, None
        names, visit = self._parameter_index.names, self._reader.read(weights)

        def decode(arrays: Sequence[Array]) -> Iterator[Reading | Histograms]:
            statistics = visit.decode(list(arrays))
            yield from statistics.readings("weight", names)
            yield Reading("weight/global_norm", ONE, np.sqrt(np.nansum(statistics.rows[:, 2])))

        return Pending(visit.tensors, decode)

"""Statistics of every weight tensor after the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probe import ONE, Array, Histograms, Pending, Probe, Reading
from forewarn.measure.probes.updates import WeightsLookedAt
from forewarn.measure.step import Step
from forewarn.measure.tensor_reader import TensorReader


class WeightProbe(Probe):
    """`weight/…` per tensor, with histograms if `reader` reads them, and `weight/global_norm`, on measured steps."""

    name = "weights"
    only_measured = True
    on_every_rank = True
    needs: Mapping[type, Sequence[str]] = {WeightsLookedAt: ()}

    def __init__(self, parameter_index: ParameterIndex, reader: TensorReader) -> None:
        self._parameter_index = parameter_index
        self._reader = reader

    def collect(self, step: Step) -> Pending | None:
        if not step.measured:
            return None
        provided = step.get(WeightsLookedAt)
        names = self._parameter_index.names
        weights = self._parameter_index.weights() if provided is None else provided.weights
        visit = self._reader.read(weights, self._parameter_index.is_sharded)

        def decode(arrays: Sequence[Array]) -> Iterator[Reading | Histograms]:
            statistics = visit.decode(list(arrays))
            yield from statistics.readings("weight", names)
            norm = float(np.sqrt(np.nansum(statistics.rows[:, 2])))
            yield Reading("weight/global_norm", ONE, step.whole_norm("weight/global_norm", norm))

        return Pending(visit.tensors, decode, visit.parts("weight"))

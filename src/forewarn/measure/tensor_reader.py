"""Reads many tensors in one visit: rows of sums, and on request histograms and exact percentiles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forewarn.histograms import NUM_BINS, PERCENTS, shifted
from forewarn.measure.engine import COLUMNS, Measurement, Numbers, in_order, measure, spread_of, summarize
from forewarn.measure.engine.quantiles import exact_percentiles
from forewarn.measure.engine.summary import rescale
from forewarn.measure.over_ranks import OWN, How, Part
from forewarn.measure.probe import Array, Histograms, Reading
from forewarn.types import Counts


@dataclass(frozen=True, slots=True)
class TensorReader:
    """Which statistics are read from tensors on a measured step."""

    histogram_blocks: int = 0
    """Number of blocks of 4096 values counted per tensor, or one block in 16 if that is more; 0 for no histograms."""
    exact: bool = False
    """Whether percentiles come from sorting each tensor rather than from its histogram."""

    def read(self, tensors: Sequence[Tensor | None], is_sharded: bool = False) -> Visit:
        """Read the tensors; shards are read such that their statistics can be added up over ranks."""
        measurement = measure(tensors, self.histogram_blocks)
        if is_sharded:  # sorted values cannot be added up: percentiles come from the histograms
            return Visit(measurement.in_one_piece(), [], [], replace(self, exact=False), is_sharded)
        return Visit(
            measurement, *(exact_percentiles(tensors, list(PERCENTS.values())) if self.exact else ([], [])), self
        )


@dataclass(frozen=True, slots=True)
class Visit:
    """The result of one visit of many tensors, partly still on their devices."""

    measurement: Measurement
    sorted_order: Sequence[int]
    sorted_rows: Sequence[Tensor]
    reader: TensorReader
    is_sharded: bool = False

    def parts(self, family: str) -> list[Part]:
        """How `tensors` are combined over ranks."""
        if not self.is_sharded:
            return [OWN] * len(self.tensors)
        rows = [Part(How.ROWS, f"{family}/norm", is_sharded=True) for _ in self.measurement.rows]
        return rows + [Part(How.SUM, f"{family}/histogram", is_sharded=True) for _ in self.measurement.histograms]

    @property
    def tensors(self) -> list[Numbers]:
        """The tensors to transfer to the host; counts that are already there are left out."""
        travelling = [part for part in self.measurement.histograms if isinstance(part, Tensor)]
        return [*self.measurement.rows, *travelling, *self.sorted_rows]

    def decode(self, arrays: list[Array]) -> Statistics:
        """The statistics in the order of the tensors; removes what belongs to `tensors` from the front of `arrays`."""
        order = self.measurement.order
        rows = in_order(order, [arrays.pop(0) for _ in self.measurement.rows])
        counts: Counts | None = None
        exact: Array | None = None
        if self.reader.histogram_blocks:
            parts = [arrays.pop(0) if isinstance(part, Tensor) else part for part in self.measurement.histograms]
            counts = in_order(order, parts, np.empty((0, 2, NUM_BINS))).astype(np.int64, copy=False)
        if self.reader.exact:
            exact = np.full((len(order), len(PERCENTS)), np.nan)
            if self.sorted_rows:
                exact[list(self.sorted_order)] = np.concatenate([arrays.pop(0) for _ in self.sorted_rows])
        return Statistics(rows, counts, exact)


@dataclass(slots=True)
class Statistics:
    """The statistics of many tensors on the host."""

    rows: Array
    counts: Counts | None
    """[n × 2 × bins]; a tensor that has values but no counts has no histogram."""
    exact: Array | None
    """[n × percentiles], if they were read by sorting."""

    @classmethod
    def of(cls, parts: Sequence[tuple[NDArray[np.intp], Statistics]], num_tensors: int) -> Statistics:
        """Combine the statistics of parts, given with their indices; NaN and no counts for tensors in no part."""
        if len(parts) == 1 and np.array_equal(parts[0][0], np.arange(num_tensors)):
            return parts[0][1]
        combined = cls(np.full((num_tensors, len(COLUMNS)), np.nan), None, None)
        for indices, part in parts:
            combined.rows[indices] = part.rows
            if part.counts is not None:
                if combined.counts is None:
                    combined.counts = np.zeros((num_tensors, 2, NUM_BINS), np.int64)
                combined.counts[indices] = part.counts
            if part.exact is not None:
                if combined.exact is None:
                    combined.exact = np.full((num_tensors, len(PERCENTS)), np.nan)
                combined.exact[indices] = part.exact
        return combined

    def over(self, scale: float) -> Statistics:
        """The statistics of the values divided by a scale; counts only survive division by a power of two."""
        counts = self.counts
        if counts is not None:
            counts = shifted(counts, -power) if (power := power_of_two(scale)) is not None else np.zeros_like(counts)
        return Statistics(rescale(self.rows, scale), counts, None if self.exact is None else self.exact / scale)

    def readings(self, family: str, names: tuple[str, ...]) -> Iterator[Reading | Histograms]:
        """`family/norm` and so on for every tensor; also histograms, percentiles and shapes, if they were counted."""
        quantities = summarize(self.rows)
        for quantity, values in quantities.items():
            yield Reading(f"{family}/{quantity}", names, values)
        percentiles = {} if self.exact is None else dict(zip(PERCENTS, self.exact.T, strict=True))
        if self.counts is not None:
            spread = spread_of(self.counts, self.rows)
            percentiles = percentiles or dict(spread.percentiles)
            yield Reading(f"{family}/shape", names, spread.shapes)
            if not np.isnan(spread.percentiles["p50"]).all():  # something was counted
                yield Histograms(f"{family}/histogram", names, spread.counts, spread.zeros)
        for quantity, values in percentiles.items():
            yield Reading(f"{family}/{quantity}", names, values)


def power_of_two(scale: float) -> int | None:
    """The exponent of a scale that is a power of two; None for any other."""
    mantissa, exponent = math.frexp(scale)
    return exponent - 1 if mantissa == 0.5 else None

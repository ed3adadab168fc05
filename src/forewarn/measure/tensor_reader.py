"""Reading many tensors in one visit: rows of sums, histograms if they are wanted, exact percentiles on request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forewarn.histograms import NUM_BINS, PERCENTS, shifted
from forewarn.measure.engine import COLUMNS, Measurement, Numbers, in_order, measure, spread_of, summarize
from forewarn.measure.engine.quantiles import exact_percentiles
from forewarn.measure.engine.summary import rescale
from forewarn.measure.probe import Array, Histograms, Reading
from forewarn.types import Counts


@dataclass(frozen=True, slots=True)
class TensorReader:
    """What is read of tensors on a measured step."""

    histogram_blocks: int = 0
    """0 for no histograms, else of how many blocks of 4096 values per tensor, and one in 16 of larger ones."""
    exact: bool = False
    """Whether percentiles come from sorting each tensor rather than from its histogram."""

    def read(self, tensors: Sequence[Tensor | None]) -> Visit:
        found = measure(tensors, self.histogram_blocks)
        return Visit(found, *(exact_percentiles(tensors, list(PERCENTS.values())) if self.exact else ([], [])), self)


@dataclass(frozen=True, slots=True)
class Visit:
    """What one visit of many tensors has found, in part still on their devices."""

    found: Measurement
    sorted_order: Sequence[int]
    sorted_rows: Sequence[Tensor]
    reader: TensorReader

    @property
    def tensors(self) -> list[Numbers]:
        """What has to travel to the host; counts that are there already need not."""
        travelling = [part for part in self.found.histograms if isinstance(part, Tensor)]
        return [*self.found.rows, *travelling, *self.sorted_rows]

    def decode(self, arrays: list[Array]) -> Statistics:
        """The statistics in the order of the tensors; takes what belongs to `tensors` off the front of `arrays`."""
        order = self.found.order
        rows = in_order(order, [arrays.pop(0) for _ in self.found.rows])
        counts: Counts | None = None
        exact: Array | None = None
        if self.reader.histogram_blocks:
            parts = [arrays.pop(0) if isinstance(part, Tensor) else part for part in self.found.histograms]
            counts = in_order(order, parts, np.empty((0, 2, NUM_BINS))).astype(np.int64, copy=False)
        if self.reader.exact:
            exact = np.full((len(order), len(PERCENTS)), np.nan)
            if self.sorted_rows:
                exact[list(self.sorted_order)] = np.concatenate([arrays.pop(0) for _ in self.sorted_rows])
        return Statistics(rows, counts, exact)


@dataclass(slots=True)
class Statistics:
    """What is known of many tensors once it is on the host."""

    rows: Array
    counts: Counts | None
    """[n × 2 × bins]; a tensor without counts, though it has values, has no histogram."""
    exact: Array | None
    """[n × percentiles], if these were read by sorting."""

    @classmethod
    def of(cls, parts: Sequence[tuple[NDArray[np.intp], Statistics]], num_tensors: int) -> Statistics:
        """The statistics of all tensors from those of some, by their places; NaN and no counts for the others."""
        if len(parts) == 1 and np.array_equal(parts[0][0], np.arange(num_tensors)):
            return parts[0][1]
        whole = cls(np.full((num_tensors, len(COLUMNS)), np.nan), None, None)
        for which, part in parts:
            whole.rows[which] = part.rows
            if part.counts is not None:
                if whole.counts is None:
                    whole.counts = np.zeros((num_tensors, 2, NUM_BINS), np.int64)
                whole.counts[which] = part.counts
            if part.exact is not None:
                if whole.exact is None:
                    whole.exact = np.full((num_tensors, len(PERCENTS)), np.nan)
                whole.exact[which] = part.exact
        return whole

    def over(self, scale: float) -> Statistics:
        """The statistics of the same values divided by a scale: bins move by whole places, or not at all."""
        counts = self.counts
        if counts is not None:
            counts = shifted(counts, -power) if (power := power_of_two(scale)) is not None else np.zeros_like(counts)
        return Statistics(rescale(self.rows, scale), counts, None if self.exact is None else self.exact / scale)

    def readings(self, family: str, names: tuple[str, ...]) -> Iterator[Reading | Histograms]:
        """`family/norm` and its like for every tensor; with histograms also these, percentiles and shapes."""
        quantities = summarize(self.rows)
        for quantity, values in quantities.items():
            yield Reading(f"{family}/{quantity}", names, values)
        found = {} if self.exact is None else dict(zip(PERCENTS, self.exact.T, strict=True))
        if self.counts is not None:
            spread = spread_of(self.counts, self.rows)
            found = found or dict(spread.percentiles)
            yield Reading(f"{family}/shape", names, spread.shapes)
            if not np.isnan(spread.percentiles["p50"]).all():  # something was counted
                yield Histograms(f"{family}/histogram", names, spread.counts, spread.zeros)
        for quantity, values in found.items():
            yield Reading(f"{family}/{quantity}", names, values)


def power_of_two(scale: float) -> int | None:
    """The exponent of a scale that is a power of two; None if it is none."""
    mantissa, exponent = math.frexp(scale)
    return exponent - 1 if mantissa == 0.5 else None

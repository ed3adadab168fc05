"""Histogram bins by sign and power of two of the magnitude, the same for all tensors and runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from forewarn.types import Counts, Distribution

NUM_BINS = 64
LOWEST_EXPONENT = -40
"""Bin b of a histogram counts magnitudes in [2^(b − 40), 2^(b − 39)); the first and last include all values beyond."""

PERCENTS: Mapping[str, int] = MappingProxyType({"p01": 1, "p25": 25, "p50": 50, "p75": 75, "p95": 95, "p99": 99})
"""The percentiles recorded with each histogram."""


def used_bins(counts: Counts) -> slice:
    """The smallest range of bins that holds all counts of all tensors [n × 2 × bins]."""
    used = np.flatnonzero(counts.any(axis=(0, 1)))
    return slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 0)


def in_line(counts: Counts, zeros: Counts) -> Counts:
    """Counts [n × (2 · bins + 1)] in the order of the values: large negative, small negative, zero, small, large."""
    return np.concatenate([counts[:, 0, ::-1], zeros[:, None], counts[:, 1]], axis=1)


def line_edges(bins: slice) -> NDArray[np.float64]:
    """The bin edges for the counts of `in_line`; zeros lie in the middle."""
    magnitudes = 2.0 ** np.arange(bins.start + LOWEST_EXPONENT, bins.stop + LOWEST_EXPONENT + 1)
    return np.concatenate([-magnitudes[::-1], magnitudes])


def merged(parts: Sequence[Distribution]) -> Distribution:
    """The sum of histograms of the same tensors (from micro-batches, ranks or steps); the bins are fixed.

    Step and time are taken from the last part.
    """
    last = parts[-1]
    for part in parts:
        if (part.name, part.scopes) != (last.name, last.scopes):
            raise ValueError(
                f"histograms of {part.name} for {len(part.scopes)} scopes and of {last.name} for {len(last.scopes)} "
                "do not belong to the same tensors; merge only histograms of one metric with the same scopes"
            )
    counts = np.sum([part.counts for part in parts], axis=0)
    return dataclasses.replace(last, counts=counts, zeros=np.sum([part.zeros for part in parts], axis=0))


def over_scopes(distribution: Distribution) -> Distribution:
    """The histogram of all tensors together."""
    return dataclasses.replace(
        distribution,
        scopes=("",),
        counts=distribution.counts.sum(axis=0, keepdims=True),
        zeros=distribution.zeros.sum(keepdims=True),
    )


def shifted(counts: Counts, power: int) -> Counts:
    """The histograms of the values times 2^power; values that leave the range are counted in the outermost bins.

    The outermost bins have no outer edge. If their values move back into the range, their magnitude is unknown, and the
    tensor's counts become zero, which means no histogram.
    """
    if power == 0:
        return counts
    moved = np.zeros_like(counts)
    away = min(abs(power), NUM_BINS - 1)
    if power > 0:
        moved[:, :, away:] = counts[:, :, : NUM_BINS - away]
        moved[:, :, -1] += counts[:, :, NUM_BINS - away :].sum(axis=2)
        moved[counts[:, :, 0].any(axis=1)] = 0
    else:
        moved[:, :, : NUM_BINS - away] = counts[:, :, away:]
        moved[:, :, 0] += counts[:, :, :away].sum(axis=2)
        moved[counts[:, :, -1].any(axis=1)] = 0
    return moved

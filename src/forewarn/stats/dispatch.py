"""One way in to the statistics of many tensors; the best backend for each of them reads it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forewarn.stats import portable
from forewarn.stats.engine import COLUMNS, NUM_BINS, Measurement, Numbers


def measure(tensors: Sequence[Tensor | None], histogram: bool = False) -> Measurement:
    """Statistics of many tensors in one visit, still on their devices; a None is a row of NaN."""
    missing = [at for at, tensor in enumerate(tensors) if tensor is None]
    places: dict[torch.device, list[int]] = {}
    for at, tensor in enumerate(tensors):
        if tensor is not None:
            places.setdefault(tensor.device, []).append(at)
    order: list[int] = []
    rows: list[Numbers] = []
    histograms: list[Numbers] = []
    for which in places.values():
        part, counts = portable.measure([tensor for at in which if (tensor := tensors[at]) is not None], histogram)
        order += which
        rows.append(part)
        if counts is not None:
            histograms.append(counts)
    if missing:
        order += missing
        rows.append(np.full((len(missing), len(COLUMNS)), np.nan))
        if histogram:
            histograms.append(np.zeros((len(missing), 2, NUM_BINS), np.int64))
    return Measurement(tuple(order), tuple(rows), tuple(histograms))

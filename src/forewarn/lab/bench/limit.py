"""The least that measuring gradients can cost: reading them once. And what one visit by forewarn's engine costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from forewarn.lab.bench.measurements import Visits
from forewarn.measure.engine import ALL_BLOCKS, measure

REPEATS = 15
EVICTING_ELEMENTS = 32_000_000
"""128 MB: more than the caches of common processors hold."""


def visits(sizes: Sequence[int]) -> Visits:
    """CPU time of reading float32 tensors of these sizes once: in one piece by the fastest operation torch has, and by
    the engine with and without a full histogram.

    All take turns. Other numbers pass through the caches before each, as they do between a backward pass and what
    reads its gradients.
    """
    generator = torch.Generator().manual_seed(0)
    whole = 1e-3 * torch.randn(sum(sizes), generator=generator)
    tensors, others = whole.split(list(sizes)), torch.ones(EVICTING_ELEMENTS)
    ways: list[Callable[[], object]] = [
        whole.sum,
        lambda: torch.linalg.vector_norm(whole),
        lambda: torch.dot(whole, whole),
        lambda: measure(tensors),
        lambda: measure(tensors, histogram_blocks=ALL_BLOCKS),
    ]
    spent: list[list[float]] = [[] for _ in ways]
    for _ in range(REPEATS):
        for way, times in zip(ways, spent, strict=True):
            others.sum()
            begin = time.process_time()
            way()
            times.append(time.process_time() - begin)
    *reads, rows, histograms = map(statistics.median, spent)
    return Visits(min(reads), rows, histograms)

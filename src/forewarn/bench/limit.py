"""The least that measuring gradients can cost: reading them once."""

from __future__ import annotations

import statistics
import time

import torch

REPEATS = 15
EVICTING_ELEMENTS = 32_000_000
"""128 MB: more than the caches of common processors hold."""


def read_seconds(num_elements: int) -> float:
    """CPU time of one streaming read of so many float32 numbers in one piece, by the fastest operation torch has.

    Other numbers pass through the caches before each read, as they do between a backward pass and what reads its
    gradients.
    """
    numbers, others = torch.ones(num_elements), torch.ones(EVICTING_ELEMENTS)
    fastest = float("inf")
    for read in (torch.sum, torch.linalg.vector_norm, lambda x: torch.dot(x, x)):
        spent: list[float] = []
        for _ in range(REPEATS):
            others.sum()
            begin = time.process_time()
            read(numbers)
            spent.append(time.process_time() - begin)
        fastest = min(fastest, statistics.median(spent))
    return fastest

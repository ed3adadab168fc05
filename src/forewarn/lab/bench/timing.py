"""CPU time in pairs: each step of a contender runs next to a bare step, so that both see the same machine state.

Also measures the lower limit of reading all gradients, and the cost of one pass by forewarn's engine.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from forewarn.lab.bench.contender import WARM_UP_STEPS, Contender, Loop, Turn
from forewarn.lab.bench.counting import weighted
from forewarn.lab.bench.measurements import Visits
from forewarn.lab.bench.workloads import Training, Workload
from forewarn.measure.engine import ALL_BLOCKS, measure

VISIT_REPEATS = 15
EVICTING_ELEMENTS = 32_000_000
"""128 MB: more than the caches of common processors hold."""


@dataclass(frozen=True, slots=True)
class Pair:
    """CPU seconds per step, from one turn."""

    added: float
    """Added by all threads of the process to the bare step; rare steps are weighted by how often they occur."""
    alone: float
    """The bare step."""


def timed_turn(workload: Workload, contender: Contender, turn: Turn) -> Pair:
    """One turn of a contender beside the bare loop. The bare loop itself runs alone, and adds nothing by definition."""
    gc.collect()
    if type(contender) is Contender:
        return Pair(0.0, _mean(_by_itself(workload, contender, turn, workload.build())))
    alone, watched = (_one_after_the_other if contender.is_process_wide else _crossed)(workload, contender, turn)
    added = [total - bare for total, bare in zip(watched, alone, strict=True)]
    weights = turn.weights(contender.period)
    return Pair(weighted(added, weights * (len(added) // len(weights))), _mean(alone))


def _one_after_the_other(workload: Workload, contender: Contender, turn: Turn) -> tuple[list[float], list[float]]:
    """Seconds of each timed step: the bare loop first, then the contender, with the same model."""
    training = workload.build()
    alone = _by_itself(workload, Contender(), turn, training)
    return alone, _by_itself(workload, contender, turn, training)


def _by_itself(workload: Workload, contender: Contender, turn: Turn, training: Training) -> list[float]:
    """Seconds of each timed step, with nothing in between."""
    spent: list[float] = []
    with Loop(workload, contender, turn, training) as loop:
        for step in range(turn.num_steps):
            if step == WARM_UP_STEPS:
                loop.settle()
            loop.fetch()
            begin = time.process_time()
            loop.step()
            spent.append(time.process_time() - begin)
    return spent[WARM_UP_STEPS:]


def _crossed(workload: Workload, contender: Contender, turn: Turn) -> tuple[list[float], list[float]]:
    """Seconds of each timed step of the bare loop and of the contender, which swap models halfway.

    The place in memory changes the speed of a model by more than most contenders add.
    """
    first_model, second_model = workload.build(), workload.build()
    first_half = _side_by_side(workload, contender, turn, first_model, second_model)
    second_half = _side_by_side(workload, contender, turn, second_model, first_model)
    return first_half[0] + second_half[0], first_half[1] + second_half[1]


def _side_by_side(
    workload: Workload, contender: Contender, turn: Turn, plain: Training, under_watch: Training
) -> tuple[list[float], list[float]]:
    """Seconds of each timed step of the bare loop and of the contender, which take turns at going first.

    The bare loop has one thread, so the work of any other thread counts as the contender's, whenever it is done.
    """
    alone: list[float] = []
    together: list[float] = []
    with Loop(workload, Contender(), turn, plain) as bare, Loop(workload, contender, turn, under_watch) as watched:
        for step in range(turn.num_steps):
            if step == WARM_UP_STEPS:
                watched.settle()
            bare.fetch()
            watched.fetch()
            begin = time.process_time()
            if step % 2:
                watched.step()
            begin_bare = time.thread_time()
            bare.step()
            alone.append(time.thread_time() - begin_bare)
            if step % 2 == 0:
                watched.step()
            together.append(time.process_time() - begin - alone[-1])
    return alone[WARM_UP_STEPS:], together[WARM_UP_STEPS:]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def visits(sizes: Sequence[int]) -> Visits:
    """CPU time of one pass over float32 tensors of these sizes.

    torch's fastest reduction reads them as one block of memory; the engine reads them tensor by tensor, with and
    without full histograms. They take turns, and the caches are flushed before each, as by a backward pass.
    """
    generator = torch.Generator().manual_seed(0)
    block = 1e-3 * torch.randn(sum(sizes), generator=generator)
    tensors, evicting = block.split(list(sizes)), torch.ones(EVICTING_ELEMENTS)
    passes: list[Callable[[], object]] = [
        block.sum,
        lambda: torch.linalg.vector_norm(block),
        lambda: torch.dot(block, block),
        lambda: measure(tensors),
        lambda: measure(tensors, histogram_blocks=ALL_BLOCKS),
    ]
    spent: list[list[float]] = [[] for _ in passes]
    for _ in range(VISIT_REPEATS):
        for one_pass, times in zip(passes, spent, strict=True):
            evicting.sum()
            begin = time.process_time()
            one_pass()
            times.append(time.process_time() - begin)
    *reads, rows, histograms = map(statistics.median, spent)
    return Visits(min(reads), rows, histograms)

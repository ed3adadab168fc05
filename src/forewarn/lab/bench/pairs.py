"""Timing by pairs: between any two steps of a contender the bare loop makes one, so that both see the same machine."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

from forewarn.lab.bench.contender import WARM_UP_STEPS, Contender, Loop, Turn
from forewarn.lab.bench.counting import weighted
from forewarn.lab.bench.workloads import Training, Workload


@dataclass(frozen=True, slots=True)
class Pair:
    """CPU seconds that a turn has found."""

    added: float
    """Per step, by all threads of the process, beyond the bare step beside it; rare steps at their share."""
    alone: float
    """The bare step."""


def timed_turn(workload: Workload, contender: Contender, turn: Turn) -> Pair:
    """One turn of a contender and of the bare loop; the bare loop beside itself is one loop, and adds nothing."""
    gc.collect()
    if type(contender) is Contender:
        return Pair(0.0, _mean(_by_itself(workload, contender, turn, workload.build())))
    alone, whole = (_one_after_the_other if contender.is_process_wide else _crossed)(workload, contender, turn)
    added = [own - bare for own, bare in zip(whole, alone, strict=True)]
    weights = turn.weights(contender.period)
    return Pair(weighted(added, weights * (len(added) // len(weights))), _mean(alone))


def _one_after_the_other(workload: Workload, contender: Contender, turn: Turn) -> tuple[list[float], list[float]]:
    """Seconds of each timed step of the bare loop and then of the contender, with the same model."""
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
    """Seconds of each timed step of the bare loop and of the contender, which change models halfway.

    Where its memory happens to lie makes one model slower than another, by more than most contenders add.
    """
    one, other = workload.build(), workload.build()
    first = _side_by_side(workload, contender, turn, one, other)
    second = _side_by_side(workload, contender, turn, other, one)
    return first[0] + second[0], first[1] + second[1]


def _side_by_side(
    workload: Workload, contender: Contender, turn: Turn, plain: Training, under_watch: Training
) -> tuple[list[float], list[float]]:
    """Seconds of each timed step of the bare loop and of the contender, which take turns at going first.

    The bare loop has one thread. What any other thread does in the meantime is the contender's, whenever it is done.
    """
    alone: list[float] = []
    whole: list[float] = []
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
            whole.append(time.process_time() - begin - alone[-1])
    return alone[WARM_UP_STEPS:], whole[WARM_UP_STEPS:]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)

"""Which cases of a set are run."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

from forewarn.lab.faults.cases import Case
from forewarn.lab.faults.hard_negatives import HARD_NEGATIVES
from forewarn.lab.faults.injected import FAULTS
from forewarn.lab.faults.sets import WORKLOADS, Set, seeds
from forewarn.lab.faults.workload import Workload

SPREAD_SEEDS = 3
"""Healthy seeds of each workload at least: the spread over them decides whether a fault was harmful."""


@dataclass(frozen=True, slots=True)
class Selection:
    """How much of a set is run."""

    healthy_seeds: int = SPREAD_SEEDS
    """Seeds of every workload as it is."""
    negative_seeds: int = 1
    """Seeds of every hard negative on every workload it fits."""
    fault_seeds: int = 1
    """Seeds of every fault on every chosen workload."""
    workloads_per_fault: int | None = None
    """Workloads on which a fault is tried, chosen by chance; None for all that it fits."""
    workloads_per_negative: int | None = None
    workloads: Collection[str] = ()
    """Names; empty for all of the set."""
    faults: Collection[str] = ()
    """Names; empty for all."""

    def cases(self, which: Set) -> list[Case]:
        """The cases of a set: the plain scripts first, because the others are compared with them."""
        chosen = [workload for workload in WORKLOADS[which] if not self.workloads or workload.name in self.workloads]
        num_plain = max(self.healthy_seeds, self.fault_seeds, SPREAD_SEEDS)
        cases = [Case(workload.name, "", seed) for workload in chosen for seed in seeds(which, num_plain)]
        if not self.faults:
            for name, negative in HARD_NEGATIVES.items():
                for workload in _some(name, [one for one in chosen if negative.fits(one)], self.workloads_per_negative):
                    cases += [Case(workload.name, name, seed) for seed in seeds(which, self.negative_seeds)]
        for name, fault in FAULTS.items():
            if self.faults and name not in self.faults:
                continue
            for workload in _some(name, [one for one in chosen if fault.fits(one)], self.workloads_per_fault):
                cases += [Case(workload.name, name, seed) for seed in seeds(which, self.fault_seeds)]
        return cases


def _some(name: str, workloads: list[Workload], num: int | None) -> list[Workload]:
    """Some of these workloads, by chance but always the same ones."""
    if num is None or num >= len(workloads):
        return workloads
    return random.Random(name).sample(workloads, num)


QUICK = Selection(
    negative_seeds=0, workloads_per_fault=1, workloads=("mlp", "vae-mean", "two-task"),
    faults=("lr-too-high", "no-zero-grad", "not-in-optimizer", "dead-relu", "nan-batch", "label-noise-onset"),
)  # fmt: skip
"""A look in under a minute."""
SAMPLE = Selection(workloads_per_fault=1, workloads_per_negative=1)
"""What `make faults` runs: every fault and every hard negative on one workload of a set, three plain seeds of each."""
FULL = Selection(healthy_seeds=5, negative_seeds=2, fault_seeds=2)
"""What is published."""

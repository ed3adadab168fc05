"""What each family of measurements costs: the monitor with everything beside one without that family."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from forewarn.lab.bench.contender import WARM_UP_STEPS, Contender, Loop, Turn
from forewarn.lab.bench.measurements import Spread
from forewarn.lab.bench.rounds import Tell, enough_steps, past_set_aside
from forewarn.lab.bench.tiers import Forewarn
from forewarn.lab.bench.workloads import Workload
from forewarn.measure.options import Measure
from forewarn.metrics import SWITCHES

FAMILIES = tuple(SWITCHES)


@dataclass(frozen=True, slots=True)
class FamilyCosts:
    """One workload: by family, the time that it adds to a measured step, as a share of the bare step."""

    workload: str
    bare_seconds: float
    shares: dict[str, Spread]


def without(family: str) -> Measure:
    """Everything but one family."""
    return Measure.from_dict({family: "off" if family == "histograms" else False})


def families(workloads: Sequence[Workload], steps: int, directory: Path, tell: Tell) -> list[FamilyCosts]:
    """The cost of each family on each workload."""
    results = []
    for workload in workloads:
        pairs: dict[str, list[tuple[float, float]]] = {}
        num_steps = enough_steps(workload, steps, directory)
        for family in FAMILIES:
            tell(f"{workload.name}, without {family}")
            with past_set_aside():
                pairs[family] = _pairs(workload, family, num_steps, directory / workload.name / family)
        bare = statistics.median(alone for of_family in pairs.values() for alone, _ in of_family)
        shares = {family: Spread.of([added / bare for _, added in of]) for family, of in pairs.items()}
        results.append(FamilyCosts(workload.name, bare, shares))
    return results


def _pairs(workload: Workload, family: str, steps: int, directory: Path) -> list[tuple[float, float]]:
    """For each pair of steps: CPU seconds of a bare step, and what the family adds to a measured one.

    Three loops take turns in one process and swap models halfway. The threads that write count where their work began.
    """
    models = [workload.build() for _ in range(3)]
    pairs = []
    for half in range(2):
        with ExitStack() as stack:
            contenders = [
                Contender(),
                _watched("with", Measure()),
                _watched("without", without(family)),
            ]
            turns = [Turn(directory / f"{half}-{contender.name}", steps) for contender in contenders]
            loops = [
                stack.enter_context(Loop(workload, contender, turn, model))
                for contender, turn, model in zip(contenders, turns, models, strict=True)
            ]
            for step in range(WARM_UP_STEPS + steps):
                spent = [0.0] * 3
                for place in ((0, 1, 2), (2, 1, 0))[step % 2]:
                    loops[place].fetch()
                    begin = time.process_time()
                    loops[place].step()
                    loops[place].settle()
                    spent[place] = time.process_time() - begin
                if step >= WARM_UP_STEPS:
                    pairs.append((spent[0], spent[1] - spent[2]))
        models = [models[0], models[2], models[1]]
    return pairs


def _watched(name: str, measure: Measure) -> Forewarn:
    return Forewarn(name, "", lambda turn, step: True, measure=measure)

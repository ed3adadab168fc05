"""What judging costs: every rule over 1,000 tensors, on a measured step and on the steps between.

Run as `python benchmarks/judging.py [TENSORS]`. A healthy run is made up, recorded until every window is full, and then
judged step by step; each figure is the median over steps, in microseconds of process CPU time.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import pairwise

import numpy as np

from forewarn.config import Config
from forewarn.judge.judgement import Judge
from forewarn.judge.ledger import Ledger
from forewarn.judge.rules import all_rules
from forewarn.rows import Row, Sheet, layout_of
from forewarn.types import Block, ParameterInfo, RunInfo

WARM_UP_CHECKS = 80
"""Measured steps before anything is timed: the ring of 64 checks is full then."""
STEPS_BETWEEN = 20
TIMED_CHECKS = 40

ONE = ("",)


class HealthyRun:
    """Readings of a healthy run: noise around levels; a quarter of the tensors are biases that start at zero."""

    def __init__(self, num_tensors: int) -> None:
        self.rng = np.random.default_rng(0)
        self.names = tuple(
            f"blocks.{index // 4}.layer{index % 4}.{'bias' if index % 4 == 3 else 'weight'}"
            for index in range(num_tensors)
        )
        self.is_bias = np.array([name.endswith("bias") for name in self.names])
        self.level = np.exp(self.rng.normal(size=num_tensors))
        self.info = RunInfo(
            parameters={
                name: ParameterInfo((64,) if bias else (64, 64), f"Linear.{name[-6:]}", "float32", 0, True)
                for name, bias in zip(self.names, self.is_bias, strict=True)
            },
            groups=({"lr": 1e-3, "initial_lr": 1e-3},),
            metrics={"gradient_metric/mine": (0.0, 10.0)},
        )

    def noise(self, size: int, scale: float = 0.1) -> np.ndarray:
        return np.exp(scale * self.rng.normal(size=size)).astype(np.float32)

    def blocks(self, step: int, measured: bool) -> list[Block]:
        def whole(name: str, value: float) -> Block:
            return Block(step, 0.0, name, ONE, np.array([value], np.float32))

        made = [
            whole("train/loss", 2.0 * float(self.noise(1, 0.05)[0])),
            whole("gradient/global_norm", float(self.noise(1)[0])),
            Block(step, 0.0, "train/lr", ("0", "1"), np.full(2, 1e-3, np.float32)),
            whole("update/optimizer_steps", 1.0),
        ]
        if not measured:
            return made
        count = len(self.names)
        zeros = np.zeros(count, np.float32)
        grown = np.where(self.is_bias, 0.001 * np.sqrt(step + 1), 1.0) * self.level * self.noise(count, 0.01)
        tensors = {
            "gradient/norm": 0.1 * self.noise(count), "gradient/nonfinite": zeros, "gradient/missing": zeros,
            "weight/norm": grown.astype(np.float32), "weight/nonfinite": zeros,
            "update/ratio": 1e-3 * self.noise(count), "update/stopped_by": zeros,
            "gradient_metric/mine": self.noise(count),
        }  # fmt: skip
        made += [Block(step, 0.0, name, self.names, values) for name, values in tensors.items()]
        made += [
            whole("gradient/residual_norm", 0.0),
            whole("monitor/update_ratio_median", 1e-3 * float(self.noise(1)[0])),
        ]
        return made

    def steps(self, checks: int, first: int) -> Iterator[tuple[int, bool]]:
        for step in range(first, first + checks * STEPS_BETWEEN):
            yield step, step % STEPS_BETWEEN == 0


def as_recorded(step: int, blocks: list[Block], measured: bool) -> Row | Sheet:
    """These readings as a monitor passes them on."""
    layout, values = (
        layout_of([one.name for one in blocks], [one.scopes for one in blocks]),
        [one.values for one in blocks],
    )
    assert layout is not None
    together = np.concatenate(values)
    return Sheet(step, 0.0, layout, together) if measured else Row(step, 0.0, layout, together.tolist())


def costs_of(num_tensors: int, one_by_one: bool) -> dict[tuple[str, bool], list[float]]:
    """Microseconds at each timed step, measured or not, for every rule alone, or for all rules and the ledger."""
    run, rule_set = HealthyRun(num_tensors), Config().rule_set()
    history, judge, ledger = rule_set.history(run.info), Judge(rule_set, run.info), Ledger(rule_set.rules)
    costs: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for step, measured in run.steps(WARM_UP_CHECKS + TIMED_CHECKS, first=0):
        readings = as_recorded(step, run.blocks(step, measured), measured)
        begin = time.process_time_ns()
        blocks = history.append(readings)
        joined = time.process_time_ns()
        names = {block.name for block in blocks}
        due = {
            rule: [name for name in names if any(fnmatchcase(name, pattern) for pattern in rule.when)]
            for rule in rule_set.rules
        }
        marks = [("", begin), ("history", joined), ("", time.process_time_ns())]
        if one_by_one:
            for rule, new in due.items():
                if new:
                    rule.judge(step, history, rule_set.settings.get(rule.code), run.info, new)
                    marks.append((rule.code, time.process_time_ns()))
        else:
            judgement = judge(step, history, blocks)
            marks.append(("judge", time.process_time_ns()))
            ledger.update(judgement, history, run.info)
            marks.append(("ledger", time.process_time_ns()))
        if step >= WARM_UP_CHECKS * STEPS_BETWEEN:
            for (_, before), (code, after) in pairwise(marks):
                costs[code, measured].append((after - before) / 1000)
    assert not judge.failed
    assert not ledger.alerts, "the run is meant to be healthy"
    return costs


def main(num_tensors: int) -> None:
    costs = costs_of(num_tensors, one_by_one=True) | costs_of(num_tensors, one_by_one=False)
    print(f"{num_tensors} tensors, median microseconds per step")
    print(f"{'':36}{'measured':>10}{'others':>10}")
    for code, name in [
        *((rule.code, rule.name) for rule in all_rules()),
        ("judge", "all rules"),
        ("ledger", ""),
        ("history", ""),
    ]:
        cells = [costs.get((code, measured)) for measured in (True, False)]
        shown = [f"{statistics.median(times):10.1f}" if times else f"{'–':>10}" for times in cells]
        print(f"{code:8}{name:28}{''.join(shown)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)

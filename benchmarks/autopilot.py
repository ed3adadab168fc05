"""What `policy="autopilot"` does to healthy runs, and to runs with a fault.

    python benchmarks/autopilot.py --runs 40
    python benchmarks/autopilot.py --runs 20 --fault lr-too-high

Every training script of `forewarn faults` in turn, one more seed in each round: once watched with autopilot, and once
only observed. An action other than `notify` and `snapshot` changes the run. If none was taken, the score must be the
same to the last bit; otherwise it is compared with the scores of other seeds.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

import forewarn
from forewarn.lab.faults.cases import Case, trained
from forewarn.lab.faults.sets import FIRST_SEED, WORKLOADS
from forewarn.policy import HARMLESS


def cases(num: int, fault: str) -> Iterator[Case]:
    """One case of each workload, then the next seeds."""
    for round_ in itertools.count():
        for which, workloads in WORKLOADS.items():
            for workload in workloads:
                if num == 0:
                    return
                num -= 1
                yield Case(workload.name, fault, FIRST_SEED[which] + 500 + round_)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--fault", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    num_changed = num_different = 0
    for case in cases(options.runs, options.fault):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run"
            try:
                _, score, error, _ = trained(case, path, policy="autopilot")
            except KeyError as missing:
                print(f"{case.key:40} does not apply: {missing}")
                continue
            with forewarn.open_run(path) as run:
                actions = run.actions()
            _, usual, _, _ = trained(case, None)
        changing = [action for action in actions if action.action not in HARMLESS]
        num_changed += any(not action.failed for action in changing)
        num_different += score != usual
        words = [f"{one.action} at {one.step} ({one.code}{', failed' if one.failed else ''})" for one in changing]
        names = ", ".join(words) or "no action"
        print(f"{case.key:40} score {score:.5g}, observed {usual:.5g}  {names}  {error}", flush=True)
    print(f"{num_changed} of {options.runs} runs were changed, {num_different} scores differ")


if __name__ == "__main__":
    main()

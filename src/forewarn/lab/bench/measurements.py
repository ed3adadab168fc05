"""The results of a benchmark as plain data, from which tables, pages, plots and JSON are made."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Self

import numpy as np
import psutil

AGAIN = "bare-again"
"""The contender that is a second bare loop."""
BUSY_SHARE = 0.5
"""Load average per core above which the machine counts as shared with other work."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with its quartiles: half of all rounds lie between `low` and `high`."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        low, median, high = np.percentile(values, [25, 50, 75])
        return cls(float(median), float(low), float(high))


@dataclass(frozen=True, slots=True)
class Visits:
    """CPU seconds of one pass over as many numbers as all gradients hold."""

    read: float
    """A streaming read of one block of memory: the lower limit."""
    rows: float
    """forewarn's engine, tensor by tensor, all statistics but histograms."""
    histograms: float
    """The same with full histograms."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one contender adds to the bare step."""

    name: str
    description: str
    added_share: Spread
    """As a fraction of the bare step beside it: 0.1 is 10% more."""
    added_seconds: Spread
    reads: float
    """The added time as a multiple of one streaming read of all gradients."""
    operations: float
    """Torch operations added per step."""
    syncs: float
    """Operations added per step that wait for the device."""
    held_bytes: int
    """Memory held in addition at the end of a turn."""


@dataclass(frozen=True, slots=True)
class Judging:
    """CPU seconds of all rules together, on steps measured in detail and on others; None if no such step ran."""

    measured: Spread | None
    unmeasured: Spread | None
    depth: int
    """Steps of history that the rules could use at the end."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A contender that was requested but did not finish."""

    name: str
    description: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkloadResult:
    """One workload, with the cost of every contender on it."""

    name: str
    description: str
    num_parameters: int
    num_tensors: int
    optimizer: str
    rounds: int
    steps: int
    """Timed steps per contender and round."""
    bare_seconds: Spread
    bare_operations: float
    bare_syncs: float
    visits: Visits
    backend: str
    """forewarn's statistics backend; empty if forewarn did not take part."""
    costs: tuple[Cost, ...]
    judging: Judging | None
    absent: tuple[Absent, ...]

    @property
    def noise(self) -> float:
        """The largest share that the bare loop seems to add to itself: smaller shares say nothing."""
        again = next((cost.added_share for cost in self.costs if cost.name == AGAIN), None)
        return 0.0 if again is None else max(abs(again.low), abs(again.high))


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, its load and its software at the start of a benchmark."""

    processor: str
    cores: int
    memory_bytes: int
    load: float | None
    """Load average of the minute before the start; None if the system has none."""
    date: str
    versions: dict[str, str]

    @property
    def is_shared(self) -> bool:
        return self.load is not None and self.load > BUSY_SHARE * self.cores


def this_machine(packages: Iterable[str]) -> Machine:
    """This machine now, with the versions of these packages, if installed."""
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return Machine(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        date=time.strftime("%Y-%m-%d"),
        versions=versions,
    )


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

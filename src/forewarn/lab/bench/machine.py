"""Where and with what a benchmark ran."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

BUSY_SHARE = 0.5
"""Of the cores, as load average: above it, others work on this machine too."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine at one moment."""

    processor: str
    cores: int
    memory_bytes: int
    load: float | None
    """Average over the minute before the start: what others do. None where the system does not tell."""
    date: str
    versions: dict[str, str]

    @property
    def is_shared(self) -> bool:
        return self.load is not None and self.load > BUSY_SHARE * self.cores


def this_machine(packages: Iterable[str]) -> Machine:
    """This machine now, with the installed versions of these packages."""
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

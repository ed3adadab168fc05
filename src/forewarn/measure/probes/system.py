"""System resources that the run uses: memory of the host, memory and load of the device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from forewarn.measure.probe import ONE, Pending, Probe, Reading
from forewarn.measure.step import Step

_LEAST_SECONDS = 1.0
"""Minimum time between two readings: each costs tens of microseconds."""
_LEAST_SECONDS_AROUND = 10.0
"""The same for what is around the process: its children, the host, the driver of the GPU."""
_LARGEST_COST = 0.002
"""Maximum share of the time that looking around may take: a host with thousands of processes takes long to search."""


class SystemProbe(Probe):
    """Memory of this process and of the device at most once a second; of children, host and GPU every ten seconds."""

    name = "system"

    def __init__(
        self,
        device: torch.device | None = None,
        cuda: Any = torch.cuda,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`device`: the device of the model; if it is not a CUDA device, nothing is read from `cuda`."""
        self._process = psutil.Process()
        self._clock = clock
        self._device = device
        self._cuda = cuda if device is not None and device.type == "cuda" else None
        self._has_driver = self._cuda is not None
        """Whether the driver of the GPU can be asked; it needs the package nvidia-ml-py."""
        self._looked = self._next_look_around = -math.inf

    def collect(self, step: Step) -> Pending | None:
        now = self._clock()
        if now - self._looked < _LEAST_SECONDS:
            return None
        self._looked = now
        memory = self._process.memory_info()
        readings = [
            Reading("system/process_memory_bytes", ONE, memory.rss),
            Reading("system/private_memory_bytes", ONE, memory.rss - getattr(memory, "shared", 0)),
        ]
        if self._cuda is not None and self._cuda.is_initialized():
            readings += self._device_memory(self._cuda)
        if now >= self._next_look_around:
            readings += self._around(memory.rss)
            cost = self._clock() - now
            self._next_look_around = now + max(_LEAST_SECONDS_AROUND, cost / _LARGEST_COST)
        return Pending(decode=lambda _: readings)

    def _device_memory(self, cuda: Any) -> Iterator[Reading]:
        """What torch's allocator holds; it keeps count itself, so the device is not asked."""
        stats = cuda.memory_stats(self._device)
        peak = stats.get("allocated_bytes.all.peak", 0)
        yield Reading("system/cuda_allocated_bytes", ONE, stats.get("allocated_bytes.all.current", 0))
        yield Reading("system/cuda_reserved_bytes", ONE, stats.get("reserved_bytes.all.current", 0))
        yield Reading("system/cuda_peak_bytes", ONE, peak)
        yield Reading("system/cuda_retries", ONE, stats.get("num_alloc_retries", 0))
        total = cuda.get_device_properties(self._device).total_memory
        yield Reading("system/cuda_memory_share", ONE, peak / total)

    def _around(self, resident: int) -> Iterator[Reading]:
        children = sum(map(_resident, self._process.children(recursive=True)))
        yield Reading("system/children_memory_bytes", ONE, children)
        host = psutil.virtual_memory()
        used, limit = max(
            [(host.total - host.available, host.total), *_control_groups()], key=lambda group: group[0] / group[1]
        )
        yield Reading("system/host_memory_share", ONE, used / limit)
        yield Reading("system/own_memory_share", ONE, (resident + children) / limit)
        if self._has_driver:
            yield from self._driver(self._cuda)

    def _driver(self, cuda: Any) -> list[Reading]:
        try:
            return [
                Reading("system/gpu_utilization_share", ONE, cuda.utilization(self._device) / 100),
                Reading("system/gpu_memory_bytes", ONE, cuda.device_memory_used(self._device)),
                Reading("system/gpu_temperature", ONE, cuda.temperature(self._device)),
                Reading("system/gpu_power", ONE, cuda.power_draw(self._device) / 1000),
            ]
        except Exception:  # without nvidia-ml-py, or a driver that does not tell
            self._has_driver = False
            return []


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it has ended
        return 0


def _control_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Iterator[Any]:
    """Bytes used and allowed in the control group (version 2) of this process, if it has a limit, as in a container."""
    try:
        path = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return
    for folder in dict.fromkeys((root / path.strip("/"), root)):
        try:
            limit, used = ((folder / f"memory.{name}").read_text().strip() for name in ("max", "current"))
            cached = next(
                line.split()[1] for line in (folder / "memory.stat").read_text().splitlines()
                if line.startswith("inactive_file ")
            )  # fmt: skip
            if limit.isdigit() and int(limit):
                yield int(used) - int(cached), int(limit)
        except (OSError, ValueError, StopIteration):
            continue

"""Every fault of the benchmark, by name."""

from __future__ import annotations

from types import ModuleType

from forewarn.lab.faults.fault import Fault
from forewarn.lab.faults.injected import batches, builds, objectives, precision, rates, wiring


def _in(module: ModuleType) -> list[Fault]:
    return [value for value in vars(module).values() if isinstance(value, Fault)]


FAULTS: dict[str, Fault] = {
    fault.name: fault for module in (rates, wiring, builds, batches, objectives, precision) for fault in _in(module)
}

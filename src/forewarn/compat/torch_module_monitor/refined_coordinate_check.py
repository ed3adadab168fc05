"""`torch_module_monitor.refined_coordinate_check`: the check, with that package's attributes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from forewarn.compat.torch_module_monitor.hooks import MonitorHooks
from forewarn.standalone.coordinate_check import RefinedCoordinateCheck as _RefinedCoordinateCheck
from forewarn.standalone.coordinate_check import _Call, l2_norm
from forewarn.standalone.module_monitor import ModuleMonitor

__all__ = ["RefinedCoordinateCheck", "l2_norm"]


class RefinedCoordinateCheck(_RefinedCoordinateCheck):
    """`forewarn.RefinedCoordinateCheck` with the attributes of the public package.

    A module is measured and its tensors are released as soon as the model and the reference have both run it. So
    `module_inputs` and the like contain only what still waits for the other side.
    """

    def __init__(self, monitor: ModuleMonitor, modules: str = ".*") -> None:
        super().__init__(monitor, modules)
        self.monitor = monitor
        self.logger = monitor.logger
        self.module = monitor.module
        self.reference_module = monitor.reference_module
        self.format_module_name_fn = monitor.format_module_name_fn
        self.cpu_offload = monitor.cpu_offload

    @property
    def module_inputs(self) -> Mapping[str, tuple[Any, ...]]:
        """Positional arguments of the monitored model's modules, by name."""
        return MappingProxyType({name: call.args for name, call in self._held(is_reference=False).items()})

    @property
    def module_outputs(self) -> Mapping[str, Tensor]:
        return MappingProxyType({name: call.output for name, call in self._held(is_reference=False).items()})

    @property
    def reference_module_inputs(self) -> Mapping[str, tuple[Any, ...]]:
        return MappingProxyType({name: call.args for name, call in self._held(is_reference=True).items()})

    @property
    def rcc_forward_hooks(self) -> MonitorHooks:
        return MonitorHooks(self._hooks, self._sides[False].values())

    @property
    def rcc_reference_forward_hooks(self) -> MonitorHooks:
        return MonitorHooks(self._hooks, self._sides[True].values())

    def _held(self, is_reference: bool) -> dict[str, _Call]:
        """The newest call of each module on one side that has no counterpart yet."""
        return {name: calls[-1][1] for name, calls in self._waiting.items() if calls and calls[-1][0] == is_reference}

"""Whom a `ModuleMonitor` watches: the model, and the reference that it is compared with."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch import nn

from forewarn.measure.module_outputs import Modules
from forewarn.measure.references import References
from forewarn.standalone.module_monitor.mixin import MonitorMixin

if TYPE_CHECKING:
    from forewarn.standalone.module_monitor.module_monitor import ModuleMonitor


class Subjects:
    """Finds the modules of both models by name, tells those that log by themselves, and places the hooks."""

    def __init__(self, monitor: ModuleMonitor, excluded: re.Pattern[str]) -> None:
        self.modules: Modules | None = None
        self.references: References | None = None
        self._monitor = monitor
        self._excluded = excluded

    def excluded(self, name: str) -> bool:
        return self._excluded.match(name) is not None

    def set_module(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"set_module takes a torch.nn.Module, not {model!r}")
        if self.modules is not None:
            raise ValueError("the module has already been set; call close() before setting another")
        self.modules = Modules(model, self._monitor.format_module_name_fn, self.excluded)
        _introduce(self.modules, self._monitor, is_reference=False)

    def set_reference(self, model: nn.Module | None) -> None:
        if self.modules is None:
            raise ValueError("set the monitored module (set_module) before the reference module")
        self.remove_reference()
        if model is None:
            return
        modules = Modules(model, self._monitor.format_module_name_fn, self.excluded)
        different = set(self.modules.names.values()) ^ set(modules.names.values())
        if different:
            raise ValueError(
                "the reference module must have the same structure as the monitored module, but only one of them has "
                + ", ".join(sorted(different)[:5])
            )
        self.references = References(modules, self._monitor.cpu_offload)
        _introduce(modules, self._monitor, is_reference=True)

    def remove_reference(self) -> None:
        if self.references is not None:
            _introduce(self.references.modules, None, is_reference=False)
            self.references.close()
            self.references = None

    def close(self) -> None:
        self.remove_reference()
        if self.modules is not None:
            _introduce(self.modules, None, is_reference=False)
            self.modules.stop_listening()
            self.modules = None

    def listen(self, wanted: bool) -> None:
        """Have hooks on the modules while a monitored step is under way, and none else."""
        heard = self._monitor.heard
        if self.modules is not None and wanted:
            self.modules.listen(self._begins, heard, self._monitor.forward_ended)
        elif self.modules is not None:
            self.modules.stop_listening()
        if self.references is not None and wanted:
            self.references.listen(lambda name, output: heard(name, output, is_reference=True))
        elif self.references is not None:
            self.references.stop_listening()

    def name_of(self, module: nn.Module, is_reference: bool) -> tuple[str, bool]:
        """The name of a module, and whether it is the reference's."""
        if self.modules is not None and not is_reference and module in self.modules.names:
            return self.modules.names[module], False
        if self.references is not None and module in self.references.modules.names:
            return self.references.modules.names[module], True
        raise ValueError(f"this {type(module).__name__} is no part of the monitored module or of its reference")

    def _begins(self) -> None:
        if self.references is not None:
            self.references.restart()


def _introduce(modules: Modules, monitor: ModuleMonitor | None, is_reference: bool) -> None:
    """Tell the modules that log from their own forward to whom."""
    for _, module in modules.heard:
        if isinstance(module, MonitorMixin):
            module.set_module_monitor(monitor, is_reference)

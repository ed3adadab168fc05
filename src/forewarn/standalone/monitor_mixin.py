"""A mixin for modules that log from inside their own `forward`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forewarn.measure.module_outputs import NamedModules

if TYPE_CHECKING:
    from forewarn.standalone.module_monitor import ModuleMonitor


class _Attachment:
    """The monitor that a module logs to. Copies and pickles hold none, so a copied model logs nothing."""

    def __init__(self, monitor: ModuleMonitor | None = None, is_reference: bool = False) -> None:
        self.monitor = monitor
        self.is_reference = is_reference

    def __deepcopy__(self, memo: dict[int, Any]) -> _Attachment:
        return _Attachment()

    def __reduce__(self) -> tuple[type[_Attachment], tuple[()]]:
        return (_Attachment, ())


class MonitorMixin:
    """Lets a module ask `if self.is_monitoring:` and log to `self.get_module_monitor()` in its `forward`.

    It can come before or after `nn.Module` among the bases, and needs no `__init__` call. The monitor finds such
    modules in `set_module` and `set_reference_module`.
    """

    _attachment = _Attachment()

    def set_module_monitor(self, monitor: ModuleMonitor | None = None, is_reference_module: bool = False) -> None:
        """Called by the monitor; None detaches it."""
        self.__dict__["_attachment"] = _Attachment(monitor, is_reference_module)

    def get_module_monitor(self) -> ModuleMonitor | None:
        return self._attachment.monitor

    @property
    def module_monitor(self) -> ModuleMonitor | None:
        return self._attachment.monitor

    @property
    def is_reference_module(self) -> bool:
        """Whether this module is part of the reference that another is compared with."""
        return self._attachment.is_reference

    @property
    def is_monitoring(self) -> bool:
        """Whether values logged now count."""
        monitor = self._attachment.monitor
        return monitor is not None and monitor.is_monitoring(self._attachment.is_reference)


def introduce(modules: NamedModules, monitor: ModuleMonitor | None, is_reference: bool = False) -> None:
    """Tell modules that log from their own `forward` which monitor to use."""
    for _, module in modules.heard:
        if isinstance(module, MonitorMixin):
            module.set_module_monitor(monitor, is_reference)

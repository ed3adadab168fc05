"""`torch_module_monitor.hooks`."""

from forewarn.probes.module_monitor.hooks import HooksManager

__all__ = ["HooksManager"]

"""`torch_module_monitor.hooks`."""

from forewarn.measure.module_outputs import HooksManager

__all__ = ["HooksManager"]

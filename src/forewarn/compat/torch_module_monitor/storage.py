"""`torch_module_monitor.storage`."""

from forewarn.probes.module_monitor.storage import StorageManager

__all__ = ["StorageManager"]

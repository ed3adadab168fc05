"""`torch_module_monitor.storage`."""

from forewarn.standalone.module_monitor.storage import StorageManager

__all__ = ["StorageManager"]

"""`torch_module_monitor.storage`."""

from forewarn.standalone.metric_storage import StorageManager

__all__ = ["StorageManager"]

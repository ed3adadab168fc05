"""The module paths of torch-module-monitor: `from forewarn.compat import torch_module_monitor`."""

from forewarn.compat.torch_module_monitor.attention import monitor_scaled_dot_product_attention
from forewarn.compat.torch_module_monitor.hooks import HooksManager
from forewarn.compat.torch_module_monitor.monitor import ModuleMonitor, MonitorMixin
from forewarn.compat.torch_module_monitor.refined_coordinate_check import RefinedCoordinateCheck
from forewarn.compat.torch_module_monitor.storage import StorageManager

__all__ = [
    "HooksManager", "ModuleMonitor", "MonitorMixin", "RefinedCoordinateCheck", "StorageManager",
    "monitor_scaled_dot_product_attention",
]  # fmt: skip

__version__ = "0.1.0"
"""The version of torch-module-monitor whose names these are."""

"""`torch_module_monitor.attention`."""

from forewarn.probes.module_monitor.attention import monitor_scaled_dot_product_attention

__all__ = ["monitor_scaled_dot_product_attention"]

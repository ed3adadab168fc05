"""`torch_module_monitor.attention`."""

from forewarn.standalone.attention_logging import monitor_scaled_dot_product_attention

__all__ = ["monitor_scaled_dot_product_attention"]

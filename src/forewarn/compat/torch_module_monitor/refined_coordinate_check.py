"""`torch_module_monitor.refined_coordinate_check`."""

from forewarn.standalone.coordinate_check import RefinedCoordinateCheck, l2_norm

__all__ = ["RefinedCoordinateCheck", "l2_norm"]

"""Times collectives, matmuls and layers on the devices at hand, and turns them into a cluster file. See README.md."""

from moe_jax.calibration.measure import CalibrationOptions, calibrate
from moe_jax.calibration.timing import interleaved_seconds, medians

__all__ = ["CalibrationOptions", "calibrate", "interleaved_seconds", "medians"]

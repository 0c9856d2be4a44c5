"""How one MoE layer moves bytes: one contract, many orders. See README.md."""

from moe_jax.schedules import baseline as _baseline
from moe_jax.schedules import expert_parallel as _expert_parallel
from moe_jax.schedules import pause_after_gate as _pause_after_gate
from moe_jax.schedules.base import LayerSizes, ScheduleOptions, build_schedule, register, schedules

__all__ = ["LayerSizes", "ScheduleOptions", "build_schedule", "register", "schedules"]

del _baseline, _expert_parallel, _pause_after_gate

"""How one MoE layer moves bytes: one contract, many orders. See README.md."""

from moe_jax.schedules import expert_parallel as _expert_parallel
from moe_jax.schedules.base import LayerSizes, build_schedule, register, schedules

__all__ = ["LayerSizes", "build_schedule", "register", "schedules"]

del _expert_parallel

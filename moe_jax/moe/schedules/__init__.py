"""How one MoE layer moves bytes: one contract, many orders. See README.md."""

from moe_jax.moe.schedules import automatic, baseline, expert_parallel, pairwise, pause_after_gate, ring  # noqa: F401
from moe_jax.moe.schedules.contract import (
    LayerSizes,
    ScheduleOptions,
    build_schedule,
    register,
    schedule_record,
    schedules,
)

__all__ = ["LayerSizes", "ScheduleOptions", "build_schedule", "register", "schedule_record", "schedules"]

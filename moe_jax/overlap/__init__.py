"""Which transfer runs beside which computation, as data. See README.md."""

from moe_jax.overlap.blocks import CASES, SCHEDULES, BlockSchedule, Loop, Move, Prefetch, Window
from moe_jax.overlap.times import Times, exposed, shares, stage_seconds

__all__ = [
    "CASES",
    "SCHEDULES",
    "BlockSchedule",
    "Loop",
    "Move",
    "Prefetch",
    "Times",
    "Window",
    "exposed",
    "shares",
    "stage_seconds",
]

"""How one MoE layer moves bytes: one contract (`moe/schedule.py`), many orders. See README.md."""

from moe_jax.moe.schedules import deepspeed, dp, pairwise, parm, ring, s2  # noqa: F401

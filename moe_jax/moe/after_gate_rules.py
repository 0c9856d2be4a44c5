"""Decisions that need the counts of the step itself, made on the device. See README.md."""

from moe_jax.moe.after_gate_calibrate import CalibrateRule
from moe_jax.moe.after_gate_quotas import QuotaRule
from moe_jax.moe.after_gate_shadow import ShadowRule
from moe_jax.moe.after_gate_shares import ShareRule

RULES: dict[str, type] = {
    "calibrate": CalibrateRule,
    "quotas": QuotaRule,
    "shadow": ShadowRule,
    "shares": ShareRule,
}
"""By the name that a planner gives (`Planner.late_rule`)."""

"""Decisions that need the counts of the step itself, made on the device. See README.md."""

from moe_jax.after_gate.calibrate import CalibrateRule
from moe_jax.after_gate.contract import Rule, fetch_late, gather_counts
from moe_jax.after_gate.quotas import QuotaRule
from moe_jax.after_gate.shadow import ShadowRule
from moe_jax.after_gate.shares import ShareRule

RULES: dict[str, type[Rule]] = {
    "calibrate": CalibrateRule,
    "quotas": QuotaRule,
    "shadow": ShadowRule,
    "shares": ShareRule,
}
"""By the name that a planner gives (`PlannerBase.late_rule`)."""

__all__ = ["RULES", "CalibrateRule", "QuotaRule", "Rule", "ShadowRule", "ShareRule", "fetch_late", "gather_counts"]

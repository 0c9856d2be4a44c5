"""From loads to placements: predictors, the cost model, and one file per planner."""

from moe_jax.planner.balanced import SWEEPS
from moe_jax.planner.config import AFTER_GATE, NAMES, PlannerConfig
from moe_jax.planner.contract import Planner
from moe_jax.planner.cost import Cost, slots_in, standing_replica_bytes
from moe_jax.planner.fastermoe import shadow_rates
from moe_jax.planner.plan_session import PlanSession, Proposal, predicted_layer_seconds, worth_a_swap
from moe_jax.planner.predictor import Predictor, build_predictor
from moe_jax.planner.registry import build_planner

__all__ = [
    "AFTER_GATE",
    "NAMES",
    "SWEEPS",
    "Cost",
    "PlanSession",
    "Planner",
    "PlannerConfig",
    "Predictor",
    "Proposal",
    "build_planner",
    "build_predictor",
    "predicted_layer_seconds",
    "shadow_rates",
    "slots_in",
    "standing_replica_bytes",
    "worth_a_swap",
]

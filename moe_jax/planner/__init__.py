"""From loads to placements: predictors, the cost model, and one file per planner."""

import importlib
import pkgutil

# Every file is imported, so that one which declares a balancer is known by being there; `config` collects their knobs.
for _module in pkgutil.iter_modules(__path__):
    if _module.name != "config":
        importlib.import_module(f"{__name__}.{_module.name}")

from moe_jax.planner.balanced import SWEEPS  # noqa: E402
from moe_jax.planner.config import PlannerConfig  # noqa: E402
from moe_jax.planner.contract import Planner  # noqa: E402
from moe_jax.planner.cost import Cost, slots_in, standing_replica_bytes  # noqa: E402
from moe_jax.planner.fastermoe import shadow_rates  # noqa: E402
from moe_jax.planner.plan_seconds import predicted_layer_seconds, worth_a_swap  # noqa: E402
from moe_jax.planner.plan_session import PlanSession, Proposal  # noqa: E402
from moe_jax.planner.predictor import Predictor, build_predictor  # noqa: E402
from moe_jax.planner.registry import BALANCERS, build_planner, find, names, names_after_gate  # noqa: E402

NAMES, AFTER_GATE = names(), names_after_gate()

__all__ = [
    "AFTER_GATE",
    "BALANCERS",
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
    "find",
    "predicted_layer_seconds",
    "shadow_rates",
    "slots_in",
    "standing_replica_bytes",
    "worth_a_swap",
]

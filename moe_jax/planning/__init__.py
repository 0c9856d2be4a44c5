"""From loads to placements: predictors, the cost model, and one file per planner."""

import importlib
import pkgutil

# Every file is imported, so that one which declares a balancer is known by being there; `config` collects their knobs.
for _module in pkgutil.iter_modules(__path__):
    if _module.name != "config":
        importlib.import_module(f"{__name__}.{_module.name}")

from moe_jax.planning.balanced import SWEEPS  # noqa: E402
from moe_jax.planning.balancer import BALANCERS, Planner, build_planner, names  # noqa: E402
from moe_jax.planning.config import PlannerConfig  # noqa: E402
from moe_jax.planning.cost import (  # noqa: E402
    Cost,
    predicted_layer_seconds,
    slots_in,
    standing_replica_bytes,
    worth_a_swap,
)
from moe_jax.planning.fastermoe import shadow_rates  # noqa: E402
from moe_jax.planning.plan_session import PlanSession, Predictor, Proposal  # noqa: E402

NAMES, AFTER_GATE = names(), names(after_gate=True)

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
    "predicted_layer_seconds",
    "shadow_rates",
    "slots_in",
    "standing_replica_bytes",
    "worth_a_swap",
]

"""From loads to placements: predictors, the cost model, and one file per planner."""

import importlib
import pkgutil

from moe_jax import plugins

# Every file is imported, so that one which declares a balancer is known by being there; `config` collects their knobs.
for _module in pkgutil.iter_modules(__path__):
    if _module.name != "config":
        importlib.import_module(f"{__name__}.{_module.name}")

plugins.load("planners")

from moe_jax.planning.balancer import names  # noqa: E402
from moe_jax.planning.config import PlannerConfig  # noqa: E402

NAMES, AFTER_GATE = names(), names(after_gate=True)

__all__ = ["AFTER_GATE", "NAMES", "PlannerConfig"]

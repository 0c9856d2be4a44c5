"""From loads to placements: predictors, the cost model, and one file per planner."""

import importlib
import pkgutil

from moe_jax.planning.config import PlannerConfig

# Every file is imported, so that one which declares a planner is known by being there.
for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["PlannerConfig"]

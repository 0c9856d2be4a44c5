"""From a configuration to its planner."""

from __future__ import annotations

from moe_jax.planner.balanced import BalancedPlanner
from moe_jax.planner.config import PlannerConfig
from moe_jax.planner.contract import Planner, PlannerBase
from moe_jax.planner.eplb import EplbPlanner
from moe_jax.planner.fastermoe import FasterMoePlanner, FasterMoeResidualPlanner
from moe_jax.planner.flexmoe import FlexMoePlanner
from moe_jax.planner.hecate import HecatePlanner
from moe_jax.planner.none import NonePlanner
from moe_jax.planner.pro_prophet import ProProphetPlanner
from moe_jax.planner.smartmoe import SmartMoePlanner
from moe_jax.planner.topk_all import TopkAllPlanner

PLANNERS: dict[str, type[PlannerBase]] = {
    "none": NonePlanner,
    "fastermoe": FasterMoePlanner,
    "fastermoe_residual": FasterMoeResidualPlanner,
    "pro_prophet": ProProphetPlanner,
    "hecate": HecatePlanner,
    "smartmoe": SmartMoePlanner,
    "flexmoe": FlexMoePlanner,
    "eplb": EplbPlanner,
    "topk_all": TopkAllPlanner,
    "balanced": BalancedPlanner,
}


def build_planner(config: PlannerConfig) -> Planner:
    """Return the planner that `config.name` names."""
    return PLANNERS[config.name](config)

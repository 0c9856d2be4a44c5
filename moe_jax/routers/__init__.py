"""Which experts each token goes to, and with what weight: one file per router. See README.md."""

from moe_jax.routers.config import RouterConfig
from moe_jax.routers.contract import Router, RouterInputs
from moe_jax.routers.registry import build_router, choose_experts, routers
from moe_jax.routers.statistics import GateStats, balance_loss, share_statistics, z_loss

__all__ = [
    "GateStats",
    "Router",
    "RouterConfig",
    "RouterInputs",
    "balance_loss",
    "build_router",
    "choose_experts",
    "routers",
    "share_statistics",
    "z_loss",
]

"""Which experts each token goes to, and with what weight: one file per router. See README.md."""

import importlib
import pkgutil

from moe_jax.moe.routers.contract import (
    PADDING,
    Router,
    RouterInputs,
    RouterPlace,
    build_router,
    check_read,
    choose_experts,
)
from moe_jax.moe.routers.statistics import GateStats, balance_loss, share_statistics

# Every file is imported, so that one which declares a router is known by being there.
for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "PADDING",
    "GateStats",
    "Router",
    "RouterInputs",
    "RouterPlace",
    "balance_loss",
    "build_router",
    "check_read",
    "choose_experts",
    "share_statistics",
]

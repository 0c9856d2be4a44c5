"""Which experts each token goes to, and with what weight: one file per router. See README.md."""

import importlib
import pkgutil

from moe_jax import plugins

# Every file is imported, so that one which declares a router is known by being there.
for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

plugins.load("routers")

from moe_jax.moe.routers.contract import (  # noqa: E402
    PADDING,
    Router,
    RouterInputs,
    RouterPlace,
    build_router,
    check_knobs,
    choose_experts,
    find,
    router_knobs,
    routers,
)
from moe_jax.moe.routers.statistics import (  # noqa: E402
    GateStats,
    balance_loss,
    share_statistics,
    z_loss,
)

__all__ = [
    "PADDING",
    "GateStats",
    "Router",
    "RouterInputs",
    "RouterPlace",
    "balance_loss",
    "build_router",
    "check_knobs",
    "choose_experts",
    "find",
    "router_knobs",
    "routers",
    "share_statistics",
    "z_loss",
]

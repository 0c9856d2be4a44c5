"""The options of routing, checked on creation: those of every router, and the knobs that routers' files declare.

`MoEConfig` is derived of it. It is made once, after every file of the package has declared its router: the package
imports this one last.
"""

from __future__ import annotations

import dataclasses

from moe_jax.moe.routers.contract import ROUTERS, find
from moe_jax.moe.routers.options import RouterOptions

_KNOBS = tuple(dict.fromkeys(router.knobs for router in ROUTERS.values() if router.knobs is not None))
assert "topk" in ROUTERS, "import moe_jax.moe.routers first: its files declare what this one collects"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig(*_KNOBS, RouterOptions):  # pyright: ignore[reportGeneralTypeIssues]
    """Choose a router and its knobs: see `RouterOptions` for those of all, and each router's file for its own."""

    def __post_init__(self):
        super().__post_init__()
        for knobs in _KNOBS:
            knobs.check(self)
        find(self.router).check(self)

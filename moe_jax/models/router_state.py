"""What routers keep beside parameters, after an optimizer step.

Inputs: parameters before and after the update, and the step's loads. Outputs: the parameters after it, with the leaves
that are a router's state as the router sets them: no optimizer moves those. They lie among the parameters, in the gate
of their layer, so that checkpoints, --init_from and evaluation have them.
"""

from __future__ import annotations

import jax.numpy as jnp

from moe_jax.moe.config import MoEConfig
from moe_jax.routers import build_router


def with_router_state(moe: MoEConfig, before, after, loads, needed=None):
    """Return the parameters `after` an update, with the router's state moved on from `before`; the rest is `after`.

    Args:
      loads: int32 [L, sources, E] of the whole step, all its microbatches together.
      needed: int32 [L, E, bins] likewise, `StepStats.needed`, or None.
    """
    router = build_router(moe)
    if not router.state:
        return after
    gate = before["dense"]["units"]["gate"]
    moved = router.next_state({name: gate[name] for name in router.state}, jnp.sum(loads, axis=1), needed)
    return _replaced(after, ("dense", "units", "gate"), moved)


def with_same_router_state(moe: MoEConfig, tree, params):
    """Return a tree like `params`, such as their moving average, with the router's state of `params`."""
    gate, names = params["dense"]["units"]["gate"], build_router(moe).state
    return _replaced(tree, ("dense", "units", "gate"), {name: gate[name] for name in names}) if names else tree


def _replaced(tree: dict, path: tuple[str, ...], leaves: dict) -> dict:
    """Return the nested dict with other leaves at a path."""
    if not path:
        return {**tree, **leaves}
    return {**tree, path[0]: _replaced(tree[path[0]], path[1:], leaves)}

"""What routers keep beside parameters, after an optimizer step.

Inputs: parameters before and after the update, and the step's loads. Outputs: the parameters after it, with the leaves
that are a router's state as the router sets them: no optimizer moves those. They lie among the parameters, in the gate
of their layer, so that checkpoints, --init_from and evaluation have them.
"""

from __future__ import annotations

import jax.numpy as jnp

from moe_jax.models.segments import Segment, own_layers, own_loads, path_of, with_experts
from moe_jax.routers import Router, build_router


def with_router_state(segments: tuple[Segment, ...], before, after, loads, needed=None):
    """Return the parameters `after` an update, with the routers' state moved on from `before`; the rest is `after`.

    Args:
      segments: of the model.
      loads: int32 [L, sources, E] of the whole step, all its microbatches together, as in `StepStats`.
      needed: int32 [L, E, bins] likewise, `StepStats.needed`, or None.
    """
    for path, segment, router in _with_state(segments):
        gate, counts = _at(before, path), jnp.sum(own_loads(loads, segment, loads.shape[1]), axis=1)
        own = None if needed is None else own_layers(needed, segment)
        after = _replaced(after, path, router.next_state({name: gate[name] for name in router.state}, counts, own))
    return after


def with_same_router_state(segments: tuple[Segment, ...], tree, params):
    """Return a tree like `params`, such as their moving average, with the routers' state of `params`."""
    for path, _, router in _with_state(segments):
        gate = _at(params, path)
        tree = _replaced(tree, path, {name: gate[name] for name in router.state})
    return tree


def _with_state(segments: tuple[Segment, ...]) -> list[tuple[tuple[str, ...], Segment, Router]]:
    """Return (path of the gates in the parameters, segment, its router) where the router has a state."""
    found = [
        (("dense", "units", *path_of(segment, segments), "gate"), segment, build_router(segment.moe))
        for segment in with_experts(segments)
    ]
    return [(path, segment, router) for path, segment, router in found if router.state]


def _at(tree: dict, path: tuple[str, ...]) -> dict:
    """Return the dict at a path of nested ones."""
    return _at(tree[path[0]], path[1:]) if path else tree


def _replaced(tree: dict, path: tuple[str, ...], leaves: dict) -> dict:
    """Return the nested dict with other leaves at a path."""
    if not path:
        return {**tree, **leaves}
    return {**tree, path[0]: _replaced(tree[path[0]], path[1:], leaves)}

"""A router whose padding tokens go to no expert and are not counted.

Inputs: tokens [t, M] with ids int32 [t], -1 for padding: past the end of a prompt, rows that only fill a batch, and
sequences that have ended. Outputs: the `Choice` of the router behind it, where padding has the experts -1, the weight 0
and no row in any buffer, and `GateStats` that count real tokens alone.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from moe_jax.routers import Router, RouterInputs
from moe_jax.routers.statistics import count_experts


class RealTokens:
    """Ask `router`, then take the padding out of what it chose; all else is the router's own."""

    def __init__(self, router: Router):
        self._router = router

    def __getattr__(self, name):
        return getattr(self._router, name)

    def choose(self, x, params, inputs: RouterInputs):
        """Return (Choice, GateStats); `inputs.token_ids` int32 [t] must be there. Choices leave with the statistics."""
        choice, stats = self._router.choose(x, params, inputs)
        real = (inputs.token_ids >= 0)[:, None]
        expert_ids = jnp.where(real, choice.expert_ids, -1)
        choice = dataclasses.replace(
            choice,
            expert_ids=expert_ids,
            weights=jnp.where(real, choice.weights, 0),
            keep_mask=choice.keep_mask & real,
        )
        counts = count_experts(expert_ids, stats.counts.shape[0])
        return choice, dataclasses.replace(stats, counts=counts, choices=expert_ids)

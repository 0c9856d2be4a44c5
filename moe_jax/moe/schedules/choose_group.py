"""The group over which rows travel to their experts, by `MoEConfig.transport`."""

from __future__ import annotations

from moe_jax.moe.schedules.coordinated_group import build_coordinated_group
from moe_jax.moe.schedules.expert_group import ExpertGroup, build_expert_group
from moe_jax.parallel.mesh import Roles


def choose_group(roles: Roles, transport: str) -> ExpertGroup:
    """Return how rows travel in the EP and ESP groups of this mesh."""
    return build_coordinated_group(roles) if transport == "coordinated" else build_expert_group(roles, transport)

"""What the system that a balancer comes from would move and hold for the same plans, by its own rules.

Inputs: what plans replicated and moved, sample by sample. Outputs: bytes of every receiver for each step and for moves,
and optimizer state kept for replicas. One class for each way in which published systems keep replicas; a planner's file
names the one of its system (`PlannerBase.original_costs`).

Letters: docs/notation.md; n samples.
"""

from __future__ import annotations

import typing

import numpy as np

from moe_jax.cluster import all_reduce_bytes
from moe_jax.planner.cost import Cost


class Moves(typing.Protocol):
    """What plans did: expert_replicas [n, L, E], device_replicas [n, L, D], moved and arrived [n, L].

    Moved are experts whose home changed, arrived replicas that were not there a sample before.
    """

    expert_replicas: np.ndarray
    device_replicas: np.ndarray
    moved: np.ndarray
    arrived: np.ndarray


class OriginalCosts(typing.NamedTuple):
    """Bytes of a layer in each step and for moves, [n, L] each, and bytes of optimizer state a device."""

    each_step: np.ndarray
    moves: np.ndarray
    optimizer_bytes: float


def for_one_step(moves: Moves, cost: Cost) -> OriginalCosts:
    """Replicas last one step: parameters come and gradients go back; state moves with homes alone."""
    replicas = moves.expert_replicas.astype(np.int64)
    each_step = 2.0 * replicas.sum(axis=2) * cost.expert_bytes
    return OriginalCosts(each_step, moves.moved * float(cost.state_bytes), 0.0)


def standing(moves: Moves, cost: Cost) -> OriginalCosts:
    """Replicas stand, with optimizer state of their own: gradients are summed by a ring over n = replicas + 1 members.

    It sends 2 (n - 1) / n Z on each of its n links; state moves to every replica that is new.
    """
    replicas = moves.expert_replicas.astype(np.int64)
    each_step = (all_reduce_bytes(cost.expert_bytes, replicas + 1) * (replicas + 1)).sum(axis=2)
    held = moves.device_replicas.sum(axis=1).max() * float(cost.state_bytes - cost.expert_bytes)
    return OriginalCosts(each_step, moves.arrived * float(cost.state_bytes), held)

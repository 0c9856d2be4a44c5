"""Replicas of hot experts while a model generates: planned from observed loads, and kept where they serve.

Inputs: the experts that tokens took, and a planner's name. Outputs: a placement for each segment, what programs are
built for, tables, and the bank in its order. While training, replicas travel in every step, because parameters change;
here they do not, so a replica is one more row of its device's bank: all slots are home slots to a program, and nothing
is fetched. Decoded batches are small and skewed, so the fullest device waits for few experts.
Letters: docs/notation.md; a bank's row of slot g in layer l is l G + g.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.cluster import Cluster
from moe_jax.dispatch import Tables
from moe_jax.errors import UserError
from moe_jax.models import LanguageModel
from moe_jax.models.segments import Segment
from moe_jax.placement import Placement, PlanShape, build_shape, fill_tables
from moe_jax.planner import PlannerConfig, build_planner
from moe_jax.planner.cost import Cost

PLANNERS = ("balanced", "eplb")  # those that need no prices, only loads and a number of slots


@dataclasses.dataclass(frozen=True)
class Residence:
    """Where the experts of one segment are.

    Attributes:
      placement: homes and replicas; shape: what programs are built for; tables: that say so, NumPy arrays.
      slot_expert: int32 [D, L, G], the expert in each slot, -1 for none.
    """

    placement: Placement
    shape: PlanShape
    tables: Tables
    slot_expert: np.ndarray


def reside(placement: Placement) -> Residence:
    """Return how a placement is kept for good."""
    shape = build_shape(placement)
    filled = fill_tables(shape, placement)
    devices, layers, slots = filled.slot_expert.shape
    rows = np.arange(layers * slots, dtype=np.int32).reshape(1, layers, slots)
    tables = Tables(filled.dest_slot, filled.dest_num, filled.dest_den, np.broadcast_to(rows, (devices, layers, slots)))
    shape = dataclasses.replace(shape, home_slots=slots, bank_rows=layers * slots, ahead=None)
    return Residence(placement, shape, tables, filled.slot_expert)


def even_placement(model: LanguageModel, segment: Segment) -> Placement:
    """Return a segment's homes without replicas."""
    roles = model.roles_of(segment)
    devices, near = roles.size(roles.expert), roles.members_per_node
    return Placement.even(segment.config.moe_layers, segment.moe.num_experts, devices, near)


def plan_replicas(
    model: LanguageModel, experts: Sequence[np.ndarray], planner: str, replica_slots: int
) -> dict[str, Placement]:
    """Return {segment: placement} for the loads that were seen.

    Args:
      experts: int32 [tokens, L, K] of each prompt, as `Generated.experts`; sources count as alike.
      planner: one of `PLANNERS`; replica_slots: replicas that a device may hold in each layer.

    Raises:
      UserError: another planner, or a negative number of slots.
    """
    if planner not in PLANNERS:
        raise UserError(f"planner ({planner!r}) must be one of {', '.join(PLANNERS)}, which plan by loads alone")
    if replica_slots < 0:
        raise UserError(f"replica_slots ({replica_slots}) must be at least 0")
    found, taken = {}, np.concatenate(list(experts))
    for segment in model.expert_segments:
        start = even_placement(model, segment)
        layers = range(segment.first_layer, segment.first_layer + start.layers)
        counts = [np.bincount(taken[:, at][taken[:, at] >= 0], minlength=start.experts) for at in layers]
        loads = np.repeat(np.asarray(counts, np.float64)[:, None], start.devices, axis=1) / start.devices
        cost = Cost(
            cluster=Cluster(),
            model_dim=segment.config.model_dim,
            hidden_dim=segment.config.hidden_dim,
            replica_slots=replica_slots,
        )
        found[segment.name] = build_planner(PlannerConfig(name=planner)).propose(loads, start, cost)
    return found


def move_bank(bank: dict, old: np.ndarray, new: np.ndarray) -> dict:
    """Return a segment's bank in the order of other slots; the arrays given are deleted one by one.

    Args:
      bank: {name: [D Rb, ...]}; old, new: `Residence.slot_expert` before and after.
    """
    source = _source_rows(old, new)

    def one(leaf):
        moved = jax.jit(lambda leaf: jnp.take(leaf, source, axis=0), out_shardings=leaf.sharding)(leaf)
        jax.block_until_ready(moved)
        leaf.delete()  # not two banks at once
        return moved

    return {name: one(leaf) for name, leaf in bank.items()}


def _source_rows(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return int32 [D Rb], for each row of the new bank the old bank's row of its expert; any where there is none."""
    devices, layers, slots = old.shape
    row_of = np.zeros((layers, max(int(old.max()), int(new.max())) + 1), np.int32)
    device, layer, slot = np.nonzero(old >= 0)
    row_of[layer, old[device, layer, slot]] = (device * layers + layer) * slots + slot
    layer = np.broadcast_to(np.arange(layers)[None, :, None], new.shape)
    return row_of[layer, np.maximum(new, 0)].reshape(-1)

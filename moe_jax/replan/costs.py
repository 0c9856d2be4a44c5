"""What plans of a run cost: the `Cost` of each segment's planner, and how many replicas fit in a device's memory.

Inputs: a run's config and mesh, and the cluster file that the config names. Outputs: per segment, as its planner knows
of no other, a `Cost`; and the largest shape that a plan may have. Host side only. Letters: docs/notation.md.
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any

import numpy as np

from moe_jax.cluster import Cluster, cluster_named
from moe_jax.cluster.layer_seconds import matrices_of, preceding_seconds
from moe_jax.cluster.tables import LEVELS
from moe_jax.cluster.targets import device_named
from moe_jax.config.run_config import RunConfig
from moe_jax.errors import UserError
from moe_jax.models.counts import device_bytes, preceding
from moe_jax.models.model_group import rows_of
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.transfer_shape import TransferShape
from moe_jax.planning.balancer import build_planner
from moe_jax.planning.block_schedule import Times, layer_bars
from moe_jax.planning.cost import PRICES, Cost
from moe_jax.planning.plan import with_late
from moe_jax.planning.plan_shape import PlanShape, build_shape
from moe_jax.replan.segments import initial_placement, segment_runs, sizes_of


def device_tokens(config: RunConfig, roles: Roles) -> float:
    """Return a device's part of the tokens of its MP group in a microbatch."""
    rows = rows_of(config.model, roles, config.train.microbatch_size)
    return rows * config.data.sequence_length / roles.size(roles.model)


def base_cost(config: RunConfig, roles: Roles, cluster: Cluster | None = None) -> Cost:
    """Return the cost model of a segment before its memory is settled.

    Args:
      config, roles: of the segment (`segment_runs`). `PlannerConfig.replica_slots` = 'memory' counts as 0.
      cluster: None for the one that `PlannerConfig.cluster` names, else that of the mesh's devices.

    Raises:
      UserError: the file has several nodes, and no speed of the links between them.
    """
    planner, model, start = config.planner, config.model, initial_placement(config, roles)
    shards = roles.size(roles.expert_shard)
    if cluster is None:
        cluster = cluster_named(planner.cluster, roles.device_kind)
    tokens = device_tokens(config, roles)
    cluster = cluster.sized(start.nodes, start.devices_per_node).part_of(shards)
    cluster.check_priced("PlannerConfig.cluster")
    prices = PRICES[planner.price](
        cluster=cluster,
        model_dim=model.model_dim,
        hidden_dim=model.hidden_dim,
        matrices=matrices_of(model.activation),
        shards=shards,
        dtype_bytes=np.dtype(model.dtype).itemsize,
        sent_bytes=config.moe.sent_bytes(model.model_dim) or None,
        param_bytes=np.dtype(model.param_dtype).itemsize,
        form=planner.transfer,
    )
    return Cost(
        prices=prices,
        replica_slots=0 if planner.replica_slots == "memory" else planner.replica_slots,
        overlap_degree=planner.overlap_degree,
        attention_seconds=preceding_seconds(
            cluster, tokens, np.dtype(model.dtype).itemsize, **preceding(model, config.data.sequence_length)
        ),
        layers_alive=model.replica_layers,
        microbatches=config.train.grad_accum_steps,
        prefetch=model.block_wise,
    )


def layer_times(config: RunConfig, roles: Roles, cost: Cost) -> Times:
    """Return what the parts of a layer take under even loads and without replicas; config, roles: `segment_runs`."""
    members, shards = roles.size(roles.expert), roles.size(roles.expert_shard)
    computed = np.full(members, device_tokens(config, roles) * config.moe.top_k * shards)
    return Times(
        attention=cost.attention_seconds,
        experts=float(cost.prices.compute(computed)),
        exchange=float(cost.prices.exchange(computed * (1 - 1 / members))),
    )


def modelled_layers(config: RunConfig, roles: Roles) -> dict[str, Any] | None:
    """Return when what runs in a layer of each segment by the planner's prices, as plain data (`layer_bars`).

    Where prices are assumed, `range` holds the seconds at the lowest and at the highest level. None where the devices
    have no prices and `PlannerConfig.cluster` names none, or a price is absent.
    """
    path, kind = config.planner.cluster, roles.device_kind
    if not path and device_named(kind) is None:
        return None
    cluster, segments = cluster_named(path, kind), []
    for name, (own, own_roles) in segment_runs(config, roles).items():
        levels = []
        for level in LEVELS:
            try:
                cost = base_cost(own, own_roles, cluster.at_level(level))
            except UserError:
                return None
            levels.append(layer_bars(cost.prefetch, layer_times(own, own_roles, cost), own.model.recomputes))
        low, middle, high = levels
        far = own_roles.size(own_roles.expert) > own_roles.members_per_node
        links = "links" if cluster.flat else "links between nodes" if far else "links in a node"
        rows = {"compute": "compute", "links": links}
        bars = [
            {"row": rows[row], "name": what, "begin": begin, "seconds": seconds, "range": [least[-1], most[-1]]}
            for least, (row, what, begin, seconds), most in zip(low, middle, high, strict=True)
        ]
        repeats = {"layers": own.model.moe_layers, "microbatches": cost.microbatches}
        ends = [max(begin + seconds for _, _, begin, seconds in level) for level in levels]
        segments.append({"segment": name, **repeats, "seconds": ends[1], "range": [ends[0], ends[2]], "bars": bars})
    return {"cluster": cluster.name, "basis": cluster.basis(), "segments": segments}


def most_shapes(config: RunConfig, roles: Roles, costs: dict[str, Cost]) -> dict[str, PlanShape]:
    """Return {segment: shape of a plan with as many replicas as its cost allows, ahead and after the gate}.

    Every home is offered.
    """
    found = {}
    for name, (own, own_roles) in segment_runs(config, roles).items():
        planner, shape = build_planner(own.planner), build_shape(initial_placement(own, own_roles))
        if planner.config.decides_late:
            shape = with_late(planner, shape, costs[name])
        slots = min(costs[name].replica_slots, shape.experts - shape.home_slots)
        if slots and (shape.late is None or own.planner.when != "after_gate"):  # else all that there are come late
            group = {"devices": shape.devices, "devices_per_node": shape.devices_per_node, "offers": shape.home_slots}
            shape = dataclasses.replace(shape, ahead=TransferShape(**group, slots=slots))
        found[name] = shape
    return found


def settle_memory(config: RunConfig, roles: Roles) -> tuple[RunConfig, dict[str, Cost]]:
    """Settle what plans may take of a device's memory: return the config and {segment: cost of its planner}.

    `PlannerConfig.replica_slots` = 'memory' becomes the most with which a step stays within the memory by
    `device_bytes`, in `most_shapes` (Hecate 4.2); of several segments each one's layers have as many, or all that
    there are. After that `Cost.late_room` becomes the most slots after the gate, in the same way.

    Raises:
      UserError: 'memory', and the cluster file has none.
      UserError: a cluster file that is not there, or more replica slots than its memory holds.
    """
    by_memory, late = config.planner.replica_slots == "memory", build_planner(config.planner).config.decides_late
    runs = segment_runs(config, roles)
    costs = {name: base_cost(*own) for name, own in runs.items()}
    cluster = next(iter(costs.values())).prices.cluster
    memory = cluster.memory_bytes
    if by_memory:
        memory = cluster.need("memory_bytes", "PlannerConfig.replica_slots = 'memory'")
    if memory is None or not (by_memory or late):
        return config, costs
    sizes = sizes_of(config, roles)

    def with_most(field: str, limit: int) -> dict[str, Cost]:
        """Return the costs with the most in a field, up to a limit, that fits in the memory."""

        def all_with(count: int) -> dict[str, Cost]:
            return {name: dataclasses.replace(cost, **{field: count}) for name, cost in costs.items()}

        def is_too_many(count: int) -> bool:
            return device_bytes(sizes, most_shapes(config, roles, all_with(count))).at_most > memory

        return all_with(bisect.bisect_left(range(1, limit + 1), True, key=is_too_many))

    if by_memory:  # with all late slots that the planner wants
        limit = 0
        for name, cost in costs.items():
            start = initial_placement(*runs[name])
            room = cost.slots_in(memory)
            limit = max(limit, min(start.experts - build_shape(start).home_slots, room))
        costs = with_most("replica_slots", limit)
        slots = next(iter(costs.values())).replica_slots
        config = dataclasses.replace(config, planner=dataclasses.replace(config.planner, replica_slots=slots))
    if late:
        costs = with_most("late_room", max(shape.late_slots for shape in most_shapes(config, roles, costs).values()))
    return config, costs

"""What a run's planner compares plans by: the sizes of the layer that runs, and the links as its devices share them.

Inputs: a run's config and mesh. Outputs: the run as the planner of one segment sees it (planners know nothing of other
segments), its `Cost`, its replica slots as a number, and the shapes with all of them. Host side; no arrays on devices.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.cluster import Cluster, read_cluster
from moe_jax.cluster.layer_seconds import matrices_of
from moe_jax.config.run_config import RunConfig
from moe_jax.models import LanguageModel
from moe_jax.models.config import segments_of, with_experts
from moe_jax.models.counts import Sizes, device_bytes, flops_before_moe
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.transfer_shape import TransferShape
from moe_jax.planning.balancer import build_planner, with_late
from moe_jax.planning.cost import Cost, slots_in
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import PlanShape, build_shape


def segment_runs(config: RunConfig, roles: Roles) -> dict[str, tuple[RunConfig, Roles]]:
    """Return {segment: (config, roles)} of each segment with experts, first layers first."""
    return {
        segment.name: (dataclasses.replace(config, model=segment.config, moe=segment.moe), segment.roles(roles))
        for segment in with_experts(segments_of(config.model, config.moe))
    }


def initial_placement(config: RunConfig, roles: Roles) -> Placement:
    """Return even homes on the expert-parallel group of a segment, with its node boundary.

    Args:
      config, roles: as the segment's planner sees them (`segment_runs`).
    """
    devices = roles.size(roles.expert)
    return Placement.even(config.model.moe_layers, config.moe.num_experts, devices, roles.members_per_node)


USUAL_VOCABULARY = 50304  # where neither the config nor a tokenizer says one yet: GPT-2's, a multiple of 128


def run_cluster(config: RunConfig) -> Cluster:
    """Return the cluster that the run names, else one that knows nothing."""
    if config.planner.cluster:
        return read_cluster(config.planner.cluster)
    return Cluster(name="of this run; name one in PlannerConfig.cluster")


def plan_cost(config: RunConfig, roles: Roles, segment: str) -> Cost:
    """Return the planner's cost model of a segment; figures that the cluster file lacks stay absent."""
    cost, planner = _cost(*segment_runs(config, roles)[segment]), build_planner(config.planner)
    memory = cost.cluster.memory_bytes
    if memory is None or not planner.config.decides_late:
        return cost
    shapes, sizes, room = largest_shapes(config, roles, within_memory=False), sizes_of(config, roles), 0
    if all(shape.late is None for shape in shapes.values()):
        return cost
    # how many late slots of each segment fit in memory, the step's other needs included
    for slots in range(1, 1 + max(shape.late.slots for shape in shapes.values() if shape.late is not None)):
        cut = {}
        for name, shape in shapes.items():
            if shape.late is not None and shape.late.slots > slots:
                offers = min(slots, shape.late.offers)
                crossing = min(shape.late.crossing, offers * shape.devices_per_node)
                late = dataclasses.replace(shape.late, slots=slots, offers=offers, crossing=crossing)
                shape = dataclasses.replace(shape, late=late)
            cut[name] = shape
        if device_bytes(sizes, cut).at_most > memory:
            break
        room = slots
    return dataclasses.replace(cost, late_room=room)


def _cost(config: RunConfig, roles: Roles) -> Cost:
    """Return the cost model of a run of one segment, the memory that the model itself takes not counted."""
    planner, model, start = config.planner, config.model, initial_placement(config, roles)
    shards = roles.size(roles.expert_shard)
    cluster = run_cluster(config).sized(start.nodes, start.devices_per_node).part_of(shards)
    return Cost(
        cluster=cluster,
        model_dim=model.model_dim,
        hidden_dim=model.hidden_dim,
        matrices=matrices_of(model.activation),
        shards=shards,
        dtype_bytes=np.dtype(model.dtype).itemsize,
        sent_bytes=config.moe.sent_bytes(model.model_dim) or None,
        param_bytes=np.dtype(model.param_dtype).itemsize,
        replica_slots=planner.replica_slots,
        overlap_degree=planner.overlap_degree,
        attention_seconds=None if cluster.flops is None else attention_seconds(config, roles, cluster.flops),
        layers_alive=model.replica_layers,
        microbatches=config.train.grad_accum_steps,
        prefetch=model.block_wise,
        price=planner.price,
        transfer=planner.transfer if planner.transfer in ("flat", "by_node") else "auto",
    )


def attention_seconds(config: RunConfig, roles: Roles, flops: float) -> float:
    """Return the modelled forward time of what precedes an MoE layer, for one device's tokens of one microbatch."""
    model, length = config.model, config.data.sequence_length
    tokens = config.train.batch_size * length / config.train.grad_accum_steps / roles.num_devices
    return tokens * flops_before_moe(model, length) / flops


def with_replica_slots(config: RunConfig, roles: Roles) -> RunConfig:
    """Return the config with `PlannerConfig.replica_slots = 'memory'` as the number of replicas that fit (Hecate 4.2).

    That is the most with which a step stays within the device's memory by `device_bytes`, in the `largest_shapes`; of
    several segments each one's layers have as many, or all that there are.

    Raises:
      AbsentFigureError: the cluster has no memory_bytes.
    """
    if config.planner.replica_slots != "memory":
        return config
    memory = run_cluster(config).need("memory_bytes", "PlannerConfig.replica_slots = 'memory'")
    sizes, most = sizes_of(config, roles), 0

    def holding(slots: int) -> RunConfig:
        return dataclasses.replace(config, planner=dataclasses.replace(config.planner, replica_slots=slots))

    for own, own_roles in segment_runs(holding(0), roles).values():
        none, start = _cost(own, own_roles), initial_placement(own, own_roles)
        room = slots_in(memory, none.layers_alive, none.expert_bytes)
        most = max(most, min(start.experts - build_shape(start).home_slots, room))
    fewest = 0
    while fewest < most:  # bisection, with all late slots that the planner wants
        middle = (fewest + most + 1) // 2
        shapes = largest_shapes(holding(middle), roles, within_memory=False)
        if device_bytes(sizes, shapes).at_most <= memory:
            fewest = middle
        else:
            most = middle - 1
    return holding(fewest)


def sizes_of(config: RunConfig, roles: Roles, vocab_size: int = 0) -> Sizes:
    """Return what `device_bytes` takes; vocab_size: V, 0 where only the config may say it."""
    train = config.train
    model = LanguageModel(
        config=config.model,
        moe=config.moe,
        vocab_size=vocab_size or config.model.vocab_size or USUAL_VOCABULARY,
        roles=roles,
        zero_stage=train.zero_stage,
        expert_zero_stage=train.expert_zero_stage,
    )
    return Sizes(
        model=model,
        length=config.data.sequence_length,
        batch_size=train.batch_size,
        grad_accum_steps=train.grad_accum_steps,
        ema=train.ema_decay > 0,
    )


def largest_shapes(config: RunConfig, roles: Roles, within_memory: bool = True) -> dict[str, PlanShape]:
    """Return {segment: shape of a plan with as many replicas as the planner may have, ahead and after the gate}.

    Every home is offered. `PlannerConfig.replica_slots` must be a number.

    Args:
      within_memory: no more late slots than fit in the memory; else all that the planner wants.
    """
    found = {}
    for name, (own, own_roles) in segment_runs(config, roles).items():
        cost = plan_cost(config, roles, name) if within_memory else _cost(own, own_roles)
        planner, shape = build_planner(own.planner), build_shape(initial_placement(own, own_roles))
        if planner.config.decides_late:
            shape = with_late(planner, shape, cost)
        slots = min(own.planner.replica_slots, shape.experts - shape.home_slots)
        if slots and (shape.late is None or own.planner.when != "after_gate"):  # else all that there are come late
            group = {"devices": shape.devices, "devices_per_node": shape.devices_per_node, "offers": shape.home_slots}
            shape = dataclasses.replace(shape, ahead=TransferShape(**group, slots=slots))
        found[name] = shape
    return found

"""What a run's planner compares plans by: the sizes of the layer that runs, and the links as its devices share them.

Inputs: a run's config and mesh. Outputs: the run as the planner of one segment sees it (planners know nothing of other
segments), its `Cost`, its replica slots as a number, and the shapes with all of them. Host side; no arrays on devices.
"""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np

from moe_jax.cluster import Cluster, read_named_cluster
from moe_jax.cluster.layer_seconds import matrices_of
from moe_jax.config.run_config import RunConfig
from moe_jax.errors import UserError
from moe_jax.models.counts import Sizes, device_bytes, flops_before_moe, itemsize
from moe_jax.models.segments import segments_of, with_experts
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


def planned_run(config: RunConfig, roles: Roles) -> tuple[RunConfig, Roles]:
    """Return (config, roles) of the only segment with experts; the same where all layers are alike.

    Raises:
      UserError: several segments with experts.
    """
    runs = segment_runs(config, roles)
    if len(runs) > 1:
        raise UserError(
            f"this is for models with one segment that has experts, but this one has {len(runs)} ({', '.join(runs)}); "
            "take a model whose MoE layers are alike"
        )
    (found,) = runs.values()
    return found


def initial_placement(config: RunConfig, roles: Roles) -> Placement:
    """Return even homes on the expert-parallel group of the run's only segment with experts, with its node boundary."""
    config, roles = planned_run(config, roles)
    devices = roles.size(roles.expert)
    return Placement.even(config.model.moe_layers, config.moe.num_experts, devices, roles.members_per_node)


USUAL_VOCABULARY = 50304  # where neither the config nor a tokenizer says one yet: GPT-2's, a multiple of 128


def run_cluster(config: RunConfig) -> Cluster:
    """Return the cluster that the run names, else one that knows nothing."""
    if config.planner.cluster:
        return read_named_cluster(config.planner.cluster)
    return Cluster(name="of this run; name one in PlannerConfig.cluster")


def plan_cost(config: RunConfig, roles: Roles, segment: str | None = None) -> Cost:
    """Return the planner's cost model; figures that the cluster file lacks stay absent.

    Args:
      segment: that is planned for; None is the only one with experts.
    """
    own, own_roles = planned_run(config, roles) if segment is None else segment_runs(config, roles)[segment]
    cost, planner = _cost(own, own_roles), build_planner(config.planner)
    if cost.cluster.memory_bytes is None or not planner.config.decides_late:
        return cost
    shapes = _most_slots(config, roles)
    if all(shape.late is None for shape in shapes.values()):
        return cost
    return dataclasses.replace(cost, late_room=_late_room(shapes, sizes_of(config), roles, cost.cluster.memory_bytes))


def _late_room(shapes: dict[str, PlanShape], sizes: Sizes, roles: Roles, memory: float) -> int:
    """Return how many late slots of each segment fit in memory, the step's other needs by `device_bytes` included."""

    def cut(shape: PlanShape, slots: int) -> PlanShape:
        if shape.late is None or shape.late.slots <= slots:
            return shape
        offers = min(slots, shape.late.offers)
        crossing = min(shape.late.crossing, offers * shape.devices_per_node)
        late = dataclasses.replace(shape.late, slots=slots, offers=offers, crossing=crossing)
        return dataclasses.replace(shape, late=late)

    def exceeds(slots: int) -> bool:
        plan = {name: cut(shape, slots) for name, shape in shapes.items()}
        return device_bytes(sizes, roles, plan).at_most > memory

    most = max(shape.late.slots for shape in shapes.values() if shape.late is not None)
    return bisect.bisect_left(range(1, most + 1), True, key=exceeds)


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
        dtype_bytes=itemsize(model.dtype),
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
    sizes = sizes_of(config)

    def holding(slots: int) -> RunConfig:
        return dataclasses.replace(config, planner=dataclasses.replace(config.planner, replica_slots=slots))

    def fits(slots: int) -> bool:  # with all late slots that the planner wants
        return device_bytes(sizes, roles, _most_slots(holding(slots), roles)).at_most <= memory

    most = 0
    for own, own_roles in segment_runs(holding(0), roles).values():
        none, start = _cost(own, own_roles), initial_placement(own, own_roles)
        room = slots_in(memory, none.layers_alive, none.expert_bytes)
        most = max(most, min(start.experts - build_shape(start).home_slots, room))
    return holding(bisect.bisect_left(range(1, most + 1), True, key=lambda number: not fits(number)))


def sizes_of(config: RunConfig, vocab_size: int = 0) -> Sizes:
    """Return what `device_bytes` takes; vocab_size: V, 0 where only the config may say it."""
    train = config.train
    return Sizes(
        config=config.model,
        moe=config.moe,
        vocab_size=vocab_size or config.model.vocab_size or USUAL_VOCABULARY,
        length=config.data.sequence_length,
        batch_size=train.batch_size,
        grad_accum_steps=train.grad_accum_steps,
        zero_stage=train.zero_stage,
        expert_zero_stage=train.expert_zero_stage,
        ema=train.ema_decay > 0,
    )


def largest_shapes(config: RunConfig, roles: Roles) -> dict[str, PlanShape]:
    """Return {segment: shape of a plan with as many replicas as the planner may have, ahead and after the gate}.

    Every home is offered. `PlannerConfig.replica_slots` must be a number.
    """
    runs = segment_runs(config, roles)
    return {name: _largest(*own, plan_cost(config, roles, name)) for name, own in runs.items()}


def _most_slots(config: RunConfig, roles: Roles) -> dict[str, PlanShape]:
    """Return the same with all late slots that the planner wants, whatever the memory."""
    return {name: _largest(*own, _cost(*own)) for name, own in segment_runs(config, roles).items()}


def _largest(config: RunConfig, roles: Roles, cost: Cost) -> PlanShape:
    """Return it of a run of one segment."""
    planner, shape = build_planner(config.planner), build_shape(initial_placement(config, roles))
    if planner.config.decides_late:
        shape = with_late(planner, shape, cost)
    slots = min(config.planner.replica_slots, shape.experts - shape.home_slots)
    if not slots or (shape.late is not None and config.planner.when == "after_gate"):
        return shape  # all that there are come late
    group = {"devices": shape.devices, "devices_per_node": shape.devices_per_node, "offers": shape.home_slots}
    return dataclasses.replace(shape, ahead=TransferShape(**group, slots=slots))

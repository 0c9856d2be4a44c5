"""A run's segments, runs of equal layers with experts and a planner of their own: sizes, prices, memory, sessions.

Inputs: a run's config and mesh, which may be an abstract one, and the cluster file that the config names. Outputs: the
model, and per segment its buckets, a `Cost`, the largest shape that a plan may have, and a session with the rule for
its buckets. No arrays. Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from moe_jax.cluster import Cluster, cluster_named
from moe_jax.cluster.costs import Buckets as StatedBuckets
from moe_jax.cluster.layer_seconds import ScheduleLine, matrices_of, preceding_seconds
from moe_jax.cluster.targets import device_named
from moe_jax.config.run_config import RunConfig
from moe_jax.errors import UserError
from moe_jax.kernels.float8 import COMPUTE
from moe_jax.models import LanguageModel
from moe_jax.models.config import segments_of, with_experts
from moe_jax.models.counts import Sizes, device_bytes, preceding
from moe_jax.models.model_group import rows_of
from moe_jax.moe.build import layer_sizes
from moe_jax.moe.choosers import schedule_lines
from moe_jax.moe.schedule import CHOOSERS, find_schedule, schedule_on
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.static_sizes import TransferShape, round_up
from moe_jax.planning.balancer import build_planner
from moe_jax.planning.block_schedule import Times, layer_bars
from moe_jax.planning.buckets import Buckets, overflow_chance
from moe_jax.planning.cost import PRICES, Cost
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan import with_rule
from moe_jax.planning.plan_shape import PlanShape, build_shape
from moe_jax.replan.auto import SESSIONS
from moe_jax.replan.session import PlanSession

USUAL_VOCABULARY = 50304  # where neither the config nor a tokenizer says one yet: GPT-2's, a multiple of 128


def segment_runs(config: RunConfig, roles: Roles) -> dict[str, tuple[RunConfig, Roles]]:
    """Return {segment: (config, roles)} of each segment with experts, first layers first."""
    return {
        segment.name: (dataclasses.replace(config, model=segment.config, moe=segment.moe), segment.roles(roles))
        for segment in with_experts(segments_of(config.model, config.moe))
    }


def group_tokens(config: RunConfig, roles: Roles) -> int:
    """Return the tokens of an MP group in a microbatch."""
    return rows_of(config.model, roles, config.train.microbatch_size) * config.data.sequence_length


def stated_buckets(config: RunConfig, roles: Roles, plans: dict[str, PlanShape] | None) -> tuple[StatedBuckets, ...]:
    """Return the buckets of each segment whose rows travel, and what the stated loads fill of them.

    The loads are those that buckets are made for: even ones without a planner, else what the planner predicted. A
    device fills its buckets from its own part of its MP group's tokens, or from all where its schedule gates the group;
    `parm` counts as s1. Sizes only: no array is made and no device is needed.

    Args:
      plans: {segment: shape of its plans}, None without a planner.
    """
    train, found = config.train, []
    parts = 2 if config.model.overlap == "halves" else 1
    tokens = group_tokens(config, roles)
    for name, (own, own_roles) in segment_runs(config, roles).items():
        members, mp_size = own_roles.size(own_roles.expert), own_roles.size(own_roles.model)
        schedule = schedule_on(own.moe.schedule, mp_size, own_roles.size(own_roles.expert_shard))
        if members == 1 or not schedule.moves_tokens:
            continue
        plan = None if plans is None else plans[name]
        if plan is not None and plan.bucket_rows is not None and parts > 1:
            rows = plan.bucket_rows.each(lambda size: round_up(size / parts, 8))
            plan = dataclasses.replace(plan, bucket_rows=rows)
        built = schedule(own_roles, layer_sizes(own.moe, own_roles, tokens // parts, plan))
        sizes = built.sizes
        for what, layout, mean in built.buckets():
            overflow = 0.0  # the most that the chance of an exchange is to overflow
            if sizes.capacity is None and sizes.planned_rows is not None:  # planned: known where it was stated
                overflow = own.moe.overflow_chance or None
            elif sizes.capacity is None:
                chance = overflow_chance([mean], sizes.config.top_k * sizes.tokens, layout.rows.far)
                overflow = min(1.0, sizes.sources * members * chance)
            found.append(
                StatedBuckets(
                    segment=f"{name}, {what}" if what else name,
                    by_shape=layout.total,
                    expected=min(round(members * mean), layout.total),
                    exchanges=own.model.moe_layers * parts * train.grad_accum_steps,
                    overflow=overflow,
                )
            )
    return tuple(found)


def initial_placement(config: RunConfig, roles: Roles) -> Placement:
    """Return even homes on a segment's expert-parallel group, with its node boundary; config, roles: `segment_runs`."""
    devices = roles.size(roles.expert)
    return Placement.even(config.model.moe_layers, config.moe.num_experts, devices, roles.members_per_node)


def build_model(config: RunConfig, roles: Roles, vocab_size: int) -> LanguageModel:
    """Return the model of a run on its mesh; vocab_size: V."""
    stages = {"zero_stage": config.train.zero_stage, "expert_zero_stage": config.train.expert_zero_stage}
    stages["padded"] = config.data.kind == "chat"  # windows of whole conversations are filled up
    return LanguageModel(
        config=config.model, moe=config.moe, vocab_size=vocab_size, roles=roles, lora=config.lora, **stages
    )


def sizes_of(config: RunConfig, roles: Roles, vocab_size: int = 0) -> Sizes:
    """Return what `device_bytes` takes; vocab_size: V, 0 where only the config may say it."""
    train = config.train
    return Sizes(
        model=build_model(config, roles, vocab_size or config.model.vocab_size or USUAL_VOCABULARY),
        length=config.data.sequence_length,
        batch_size=train.batch_size,
        grad_accum_steps=train.grad_accum_steps,
        ema=train.ema_decay > 0,
    )


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
    tokens = group_tokens(config, roles) / roles.size(roles.model)
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
    tokens = group_tokens(config, roles) / roles.size(roles.model)
    computed = np.full(members, tokens * config.moe.top_k * shards)
    return Times(
        attention=cost.attention_seconds,
        experts=float(cost.prices.compute(computed)),
        exchange=float(cost.prices.exchange(computed * (1 - 1 / members))),
    )


def modelled_layers(config: RunConfig, roles: Roles) -> dict[str, Any] | None:
    """Return each segment's modelled timeline of a layer by the planner's prices, as plain data (`layer_bars`).

    Assumed prices are taken at their middle level. None where the devices have no prices and `PlannerConfig.cluster`
    names none, or a price is absent.
    """
    path, kind = config.planner.cluster, roles.device_kind
    if not path and device_named(kind) is None:
        return None
    cluster, segments = cluster_named(path, kind), []
    for name, (own, own_roles) in segment_runs(config, roles).items():
        try:
            cost = base_cost(own, own_roles, cluster)
        except UserError:
            return None
        far = own_roles.size(own_roles.expert) > own_roles.members_per_node
        rows = {"compute": "compute", "links": "links"}
        if not cluster.flat:
            rows["links"] = "links between nodes" if far else "links in a node"
        bars = [
            {"row": rows[row], "name": what, "begin": begin, "seconds": seconds}
            for row, what, begin, seconds in layer_bars(
                cost.prefetch, layer_times(own, own_roles, cost), own.model.recomputes
            )
        ]
        repeats = {"layers": own.model.moe_layers, "microbatches": cost.microbatches}
        end = max(bar["begin"] + bar["seconds"] for bar in bars)
        segments.append({"segment": name, **repeats, "seconds": end, "bars": bars})
    return {"cluster": cluster.name, "basis": cluster.basis(), "segments": segments}


def most_shapes(config: RunConfig, roles: Roles, costs: dict[str, Cost]) -> dict[str, PlanShape]:
    """Return {segment: shape of a plan with as many replicas as its cost allows, ahead and after the gate}.

    Every home is offered.
    """
    found = {}
    for name, (own, own_roles) in segment_runs(config, roles).items():
        planner, shape = build_planner(own.planner), build_shape(initial_placement(own, own_roles))
        shape = with_rule(planner, shape, costs[name])
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
        """Return the costs with the most in a field, up to a limit, that fits in the memory, by halving."""
        found = {name: dataclasses.replace(cost, **{field: 0}) for name, cost in costs.items()}
        most, beyond = 0, limit + 1
        while beyond - most > 1:
            count = (most + beyond + 1) // 2
            tried = {name: dataclasses.replace(cost, **{field: count}) for name, cost in costs.items()}
            if device_bytes(sizes, most_shapes(config, roles, tried)).at_most > memory:
                beyond = count
            else:
                most, found = count, tried
        return found

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


def build_sessions(config: RunConfig, roles: Roles) -> dict[str, PlanSession]:
    """Return {segment: session of its planner}, first layers first, of a run that has one.

    Raises:
      UserError: a planner that this mesh, schedule or cluster file cannot serve: experts on one device, transfers by
        node with one node, one device on a node or nodes of unequal size, slots without a bound after the gate, more
        replica slots than fit in memory, or a figure that a price needs.
    """
    planner, runs = config.planner, segment_runs(config, roles)
    devices = max(own.size(own.expert) for _, own in runs.values())
    if not find_schedule(config.moe.schedule).moves_tokens or devices == 1:
        raise UserError(
            f"PlannerConfig.name ({planner.name!r}) needs experts spread over devices, but MoEConfig.schedule is "
            f"{config.moe.schedule!r} and the expert axis has {devices}; use another schedule and "
            "MeshConfig.expert > 1, or set PlannerConfig.name = 'none'"
        )
    for _, own in runs.values() if planner.transfer == "by_node" else ():  # the smallest is built for its checks
        members, inside = own.size(own.expert), max(1, own.config.devices_per_node // own.config.expert_shard)
        TransferShape(devices=members, devices_per_node=min(inside, members), offers=1, slots=1, by_node=True)
    if planner.when == "after_gate" and not planner.bounded:
        raise UserError(
            f"PlannerConfig.bounded (False) with when = 'after_gate': a compiled step has {planner.replica_slots} "
            "replica slots; set bounded = True and replica_slots to the most that you want"
        )
    config, costs = settle_memory(config, roles)
    sessions = {}
    for name, (own, own_roles) in segment_runs(config, roles).items():
        cost, groups, start = costs[name], own_roles.size(own_roles.data), initial_placement(own, own_roles)
        if own.moe.schedule == "auto":
            cost = dataclasses.replace(cost, schedules=_lines(own, own_roles))
        exchanges, buckets = own.train.grad_accum_steps * groups, _buckets(own, own_roles)
        build = SESSIONS.get(planner.name, PlanSession)
        session = build(own.planner, start, cost, exchanges, buckets=buckets, groups=groups)
        # plan once, for even loads: a figure that a price needs and the cluster lacks is named before a step compiles
        session.first_shape  # noqa: B018
        session.trial.propose(np.ones((start.layers, start.devices, start.experts)), start, cost)
        sessions[name] = session
    return sessions


def _lines(config: RunConfig, roles: Roles) -> tuple[ScheduleLine, ...]:
    """Return what layers wait for under each schedule that this mesh, model and dtype allow."""
    model, moe = config.model, config.moe
    item = np.dtype(model.dtype).itemsize
    sizes = layer_sizes(moe, roles, group_tokens(config, roles), None, model.model_dim, item)
    sizes = dataclasses.replace(sizes, split_tokens=model.sequence_parallel)
    cluster = cluster_named(config.planner.cluster, roles.device_kind)
    cluster = cluster.on_mesh(roles.mesh.size, roles.config.devices_per_node)
    one_piece = model.prefetch != "none" or model.overlap == "halves" or moe.dispatch_dtype != COMPUTE
    return schedule_lines(roles, sizes, cluster, one_piece)


def _buckets(config: RunConfig, roles: Roles) -> Buckets | None:
    """Return the rule for a segment's buckets, None where capacities rule."""
    moe, members, mp_size = config.moe, roles.size(roles.expert), roles.size(roles.model)
    if not moe.dropless:
        return None
    sizes, data_groups = layer_sizes(moe, roles, group_tokens(config, roles)), roles.size(roles.data)
    named = CHOOSERS[moe.schedule].among if moe.schedule in CHOOSERS else (moe.schedule,)
    cuts = any(find_schedule(name).cuts_buckets for name in named)
    exchanges = config.train.grad_accum_steps * data_groups
    return Buckets(
        sizes=sizes,
        even=dataclasses.replace(sizes, groups=moe.num_experts).even_rows(members),  # the worst case bounds them later
        devices=members,
        devices_per_node=roles.members_per_node,
        chance=moe.overflow_chance / data_groups,
        multiple=math.lcm(8, mp_size),
        summed=exchanges * roles.size(roles.expert_shard) / mp_size,
        parts=2 if config.model.overlap == "halves" else 1,
        one_length=cuts and mp_size > roles.size(roles.expert_shard),
    )

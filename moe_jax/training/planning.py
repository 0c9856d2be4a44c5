"""What a run tells its planner, and the skeletons that it compiles for the answers. Host side; no arrays on devices.

Enters: a `Program`, placements, predicted loads. Leaves: the planner's `Cost`, and skeletons: the first one, of even
homes without guests, and wider ones for placements that do not fit.
Letters: L layers, D devices, E experts, S bank rows of a device, mu guest slots.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math

import numpy as np

from moe_jax.after_gate import CalibrateRule, Rule, ShadowRule, ShareRule
from moe_jax.cluster import Cluster
from moe_jax.moe.layer import layer_sizes
from moe_jax.observe import LoadsOrigin
from moe_jax.placement import Placement, Skeleton, bucket_rows, build_skeleton, fits, most_homes, routing, widen
from moe_jax.placement.transfer import cheapest_method
from moe_jax.planner import SWEEPS, Cost, PlanSession, shadow_rates
from moe_jax.training.plan import has_guests, layer_plan
from moe_jax.training.program import Program
from moe_jax.training.split import attention_seconds, read_named_cluster

HEADROOM = 1.25  # of a new bucket over the predicted rows, so that slow growth asks for few executables


def planning_cost(session: Program) -> Cost:
    """Return what the planner may ask for; figures that the cluster file lacks stay absent.

    Raises:
      UserError: a cluster file that is not there, or more guest slots than its memory holds.
    """
    config, model, roles = session.config.planner, session.config.model, session.roles
    placement = initial_placement(session)
    cluster = Cluster(name="of this run; name one in PlannerConfig.cluster")
    if config.cluster:
        cluster = read_named_cluster(config.cluster)
    cluster = cluster.sized(placement.nodes, placement.devices_per_node)
    seconds = None if cluster.flops is None else attention_seconds(session.config, roles, cluster.flops)
    return Cost(
        cluster=cluster,
        model_dim=model.model_dim,
        hidden_dim=model.hidden_dim,
        dtype_bytes=np.dtype(model.param_dtype).itemsize,
        guest_slots=config.guest_slots,
        overlap_degree=config.overlap_degree,
        attention_seconds=seconds,
        layers_alive=model.guest_layers,
        **({} if model.prefetch == "none" else {"prefetch": model.block_wise}),
    )


def initial_placement(session: Program) -> Placement:
    """Return even homes on the mesh's expert-parallel group, with its node boundary."""
    config = session.roles.config
    inside = max(1, config.devices_per_node // config.expert_shard)
    per_node = inside if session.devices % inside == 0 else session.devices
    layers, experts = session.home.shape
    return Placement.even(layers, experts, session.devices, per_node)


def loads_origin(session: Program) -> LoadsOrigin:
    """Return what stands beside the recorded loads of a run, so that a replay knows model and mesh."""
    config = session.config
    return LoadsOrigin(
        model_dim=config.model.model_dim,
        hidden_dim=config.model.hidden_dim,
        top_k=config.moe.top_k,
        dtype=config.model.dtype,
        mesh=tuple(session.roles.mesh.shape.items()),
        devices_per_node=initial_placement(session).devices_per_node,
        cluster=config.planner.cluster or config.moe.cluster,
    )


def step_loads(session: Program, loads: np.ndarray) -> np.ndarray:
    """Return a step's counts [L, sources, E] as a planner takes them: int64, one source per member of the EP group."""
    loads = np.asarray(loads, np.int64)
    assert loads.shape[1] == session.devices, loads.shape
    return loads


def plan_hash(skeleton: Skeleton, placement: Placement) -> int:
    """Return 31 bits of what a step runs with, for processes to compare."""
    text = placement.fingerprint() + repr(skeleton)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) & 0x7FFFFFFF


def bare_skeleton(placement: Placement) -> Skeleton:
    """Return the skeleton of a placement without copies."""
    return build_skeleton(placement, method="none")


def with_room_for_rule(skeleton: Skeleton, plans: PlanSession) -> Skeleton:
    """Return the skeleton with the sizes that decisions after the gate need; the same one where there are none."""
    if not plans.decides_late:
        return skeleton
    if plans.config.name.startswith("fastermoe") or not plans.config.materialize:  # guests come after the gate alone
        slots = plans.config.guest_slots
        skeleton = dataclasses.replace(
            skeleton, method="broadcast", rounds=(), gather_slots=0, broadcast_slots=slots, guest_slots=slots
        )
    if plans.config.name.startswith("fastermoe"):
        return skeleton  # a token goes home, or stays
    # a token may go to any holder, and which those are only the tables know
    return dataclasses.replace(skeleton, candidates=skeleton.devices) if has_guests(skeleton) else skeleton


def after_gate_rule(session: Program, plans: PlanSession, skeleton: Skeleton) -> Rule | None:
    """Return what a step of this skeleton decides after the gate, None for nothing."""
    config = session.config.planner
    if not (plans.decides_late and has_guests(skeleton)):
        return None
    slots = {"home_slots": skeleton.home_slots, "guest_slots": skeleton.guest_slots}
    if config.name == "balanced":
        return ShareRule(**slots, devices_per_node=skeleton.devices_per_node, sweeps=SWEEPS)
    compute, exchange, shadow = shadow_rates(plans.cost, config.name)
    replicas = session.roles.size(session.roles.data)  # the step counts the tokens of all of them
    rates = {"compute": compute / replicas, "exchange": exchange / replicas}
    if config.name == "hecate":
        return CalibrateRule(
            **slots,
            **rates,
            devices_per_node=skeleton.devices_per_node,
            most_guests=config.guest_slots,
            overlap_degree=min(plans.cost.overlap(config.name), skeleton.experts),
            copy=shadow / skeleton.devices,
            ahead=config.materialize,
        )
    return ShadowRule(**slots, **rates, shadow=shadow, residual=config.name == "fastermoe_residual")


def refined(
    session: Program, plans: PlanSession, skeleton: Skeleton, placement: Placement, loads: np.ndarray
) -> Placement:
    """Return what a step makes of a placement for its loads [L, S, E]; after the gate, of the mean microbatch."""
    if after_gate_rule(session, plans, skeleton) is None:
        return placement
    return plans.refine(loads / pieces_of(session), placement)


def pieces_of(session: Program) -> int:
    """Return how many exchanges a step's loads are summed over: microbatches times replicas."""
    return session.config.train.accumulate * session.roles.size(session.roles.data)


def predicted_rows(skeleton: Skeleton, placement: Placement, session: Program, plans: PlanSession) -> int:
    """Return the rows that the fullest bucket needs by prediction; 0 where nothing is predicted or capacities rule.

    A step's loads are sums over microbatches and replicas; a bucket is of one.
    """
    if not plans.predictor.seen or not session.config.moe.dropless:
        return 0
    loads = np.rint(plans.predictor.predict()).astype(np.int64)
    notes = dict(plans.planner.notes)  # a look ahead is no decision to be counted
    pair = routing.pair_loads(refined(session, plans, skeleton, placement, loads), loads).max() / pieces_of(session)
    plans.planner.notes.clear()
    plans.planner.notes.update(notes)
    error = min(1.0, float(np.max(plans.predictor.error(), initial=0.0)))
    rows = bucket_rows(pair, error, session.roles.size(session.roles.model))
    return min(rows, _most_rows(skeleton, session))


def _most_rows(skeleton: Skeleton, session: Program) -> int:
    """Return the rows that a planned bucket may have: the worst case, or what `PlannerConfig.bucket_limit` allows.

    Never fewer than without a plan.
    """
    sizes = _sizes(dataclasses.replace(skeleton, bucket_rows=0), session)
    mean = sizes.top_k * sizes.tokens / session.devices
    most = math.ceil(session.config.planner.bucket_limit * mean)
    return min(max(most, sizes.bucket_rows(session.devices)), sizes.worst_rows())


def rows_of(skeleton: Skeleton, session: Program) -> int:
    """Return the rows of a bucket under this skeleton."""
    return _sizes(skeleton, session).bucket_rows(session.devices)


def _sizes(skeleton: Skeleton, session: Program):
    model = session.roles.size(session.roles.model)
    tokens = session.tokens_per_step // session.config.train.accumulate * model // session.roles.num_devices
    plan = layer_plan(skeleton, session.roles.expert)
    return layer_sizes(session.config.moe, session.roles, tokens, plan)


def grow(skeleton: Skeleton, placement: Placement, session: Program, plans: PlanSession) -> Skeleton:
    """Return a skeleton that the placement fits, with buckets as large as predicted, and room for plans like it."""
    config = session.config.planner
    if not fits(skeleton, placement):
        if len(placement.copies) and skeleton.method == "none":
            method = cheapest_method(placement) if config.transfer == "auto" else config.transfer
            need = build_skeleton(placement, method=method)
            skeleton = dataclasses.replace(
                need,
                home_slots=max(need.home_slots, skeleton.home_slots),
                guest_slots=max(need.guest_slots, config.guest_slots),
                bank_rows=max(need.bank_rows, skeleton.bank_rows),
                candidates=max(need.candidates, min(placement.devices, 2 * need.candidates)),
                bucket_rows=skeleton.bucket_rows,
            )
            skeleton = with_room_for_rule(skeleton, plans)
        else:
            skeleton = widen(skeleton, placement)
    rows = predicted_rows(skeleton, placement, session, plans)
    if rows > rows_of(skeleton, session):
        step = math.lcm(8, session.roles.size(session.roles.model))
        rows = min(HEADROOM * rows, _most_rows(skeleton, session))
        skeleton = dataclasses.replace(skeleton, bucket_rows=step * math.ceil(rows / step))
    assert most_homes(placement) <= skeleton.bank_rows
    return skeleton


def planned_skeleton(program: Program, loads: np.ndarray) -> tuple[Skeleton, Rule | None]:
    """Return what a run would compile after steps with these loads, int64 [L, D, E] each: its skeleton and rule.

    The planner sees the same loads as often as its predictor looks back.
    """
    start = initial_placement(program)
    plans = PlanSession(program.config.planner, start, planning_cost(program))
    for _ in range(program.config.planner.window):
        plans.observe(loads)
    placement = plans.propose(program.config.planner.steps_between_plans).placement
    skeleton = grow(with_room_for_rule(bare_skeleton(start), plans), placement, program, plans)
    return skeleton, after_gate_rule(program, plans, skeleton)

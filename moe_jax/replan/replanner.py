"""A run's inputs to its planner, and the skeletons that it compiles for the plans. Host side; no arrays on devices.

Inputs: a run's config and mesh, placements, predicted loads. Outputs: the planner's `Cost`, and skeletons: the first
one, of even homes without replicas, and wider ones for placements that do not fit.
Letters: docs/notation.md; mu replica slots.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math

import numpy as np

from moe_jax.after_gate import CalibrateRule, Rule, ShadowRule, ShareRule
from moe_jax.cluster import Cluster, read_named_cluster
from moe_jax.config.run_config import RunConfig
from moe_jax.mesh.roles import Roles
from moe_jax.moe.layer import layer_sizes
from moe_jax.placement import Placement, Skeleton, bucket_rows, build_skeleton, fits, most_homes, routing, widen
from moe_jax.placement.transfer import cheapest_method
from moe_jax.planner import SWEEPS, Cost, PlanSession, shadow_rates
from moe_jax.replan.device_tables import has_replicas, layer_plan
from moe_jax.replan.transfer_shares import attention_seconds
from moe_jax.schedules.contract import LayerSizes

HEADROOM = 1.25  # of a new bucket over the predicted rows, so that slow growth needs few executables


class Replanner:
    """One run's planner, and the skeletons that the run compiles for what it proposes.

    Attributes:
      config: of the run; roles: its mesh; devices: D, of one expert-parallel group.
      start: the even homes that the run starts with.
      plans: the planner with its predictor, which decides where experts are.
    """

    def __init__(self, config: RunConfig, roles: Roles):
        """Build the planner.

        Raises:
          UserError: a cluster file that is not there, or more replica slots than its memory holds.
        """
        self.config, self.roles = config, roles
        self.devices = roles.size(roles.expert)
        self.start = initial_placement(config, roles)
        self.plans = PlanSession(config.planner, self.start, self._cost())

    def _cost(self) -> Cost:
        """Return the planner's cost model; figures that the cluster file lacks stay absent."""
        planner, model = self.config.planner, self.config.model
        cluster = Cluster(name="of this run; name one in PlannerConfig.cluster")
        if planner.cluster:
            cluster = read_named_cluster(planner.cluster)
        cluster = cluster.sized(self.start.nodes, self.start.devices_per_node)
        seconds = None if cluster.flops is None else attention_seconds(self.config, self.roles, cluster.flops)
        return Cost(
            cluster=cluster,
            model_dim=model.model_dim,
            hidden_dim=model.hidden_dim,
            dtype_bytes=np.dtype(model.param_dtype).itemsize,
            replica_slots=planner.replica_slots,
            overlap_degree=planner.overlap_degree,
            attention_seconds=seconds,
            layers_alive=model.replica_layers,
            **({} if model.prefetch == "none" else {"prefetch": model.block_wise}),
        )

    @property
    def exchanges_per_step(self) -> int:
        """How many exchanges a step's loads are summed over: microbatches times data-parallel groups."""
        return self.config.train.grad_accum_steps * self.roles.size(self.roles.data)

    def step_loads(self, loads: np.ndarray) -> np.ndarray:
        """Return a step's counts [L, sources, E] as a planner takes them: int64, one source per EP group member."""
        loads = np.asarray(loads, np.int64)
        assert loads.shape[1] == self.devices, loads.shape
        return loads

    def first_skeleton(self) -> Skeleton:
        """Return what the first step is compiled for: even homes, and slots for what is decided after the gate."""
        return self.with_slots_for_rule(bare_skeleton(self.start))

    def with_slots_for_rule(self, skeleton: Skeleton) -> Skeleton:
        """Return the skeleton with the sizes that decisions after the gate need; the same one where there are none."""
        if not self.plans.decides_late:
            return skeleton
        planner = self.config.planner
        if planner.name.startswith("fastermoe") or not planner.materialize:  # replicas come after the gate alone
            slots = planner.replica_slots
            skeleton = dataclasses.replace(
                skeleton, method="broadcast", rounds=(), gather_slots=0, broadcast_slots=slots, replica_slots=slots
            )
        if planner.name.startswith("fastermoe"):
            return skeleton  # a token goes to the home, or stays where it is
        # a token may go to any holder, and only the tables say which those are
        return dataclasses.replace(skeleton, candidates=skeleton.devices) if has_replicas(skeleton) else skeleton

    def after_gate_rule(self, skeleton: Skeleton) -> Rule | None:
        """Return what a step of this skeleton decides after the gate, None for nothing."""
        config, cost = self.config.planner, self.plans.cost
        if not (self.plans.decides_late and has_replicas(skeleton)):
            return None
        slots = {"home_slots": skeleton.home_slots, "replica_slots": skeleton.replica_slots}
        if config.name == "balanced":
            return ShareRule(**slots, devices_per_node=skeleton.devices_per_node, sweeps=SWEEPS)
        compute, exchange, shadow = shadow_rates(cost, config.name)
        data_parallel = self.roles.size(self.roles.data)  # the step counts the tokens of all of them
        rates = {"compute": compute / data_parallel, "exchange": exchange / data_parallel}
        if config.name == "hecate":
            return CalibrateRule(
                **slots,
                **rates,
                devices_per_node=skeleton.devices_per_node,
                most_replicas=config.replica_slots,
                overlap_degree=min(cost.overlap(config.name), skeleton.experts),
                late_transfer=shadow / skeleton.devices,
                ahead=config.materialize,
            )
        return ShadowRule(**slots, **rates, shadow=shadow, residual=config.residual)

    def refined(self, skeleton: Skeleton, placement: Placement, loads: np.ndarray) -> Placement:
        """Return what a step makes of a placement for its loads [L, S, E]; after the gate, of the mean microbatch."""
        if self.after_gate_rule(skeleton) is None:
            return placement
        return self.plans.refine(loads / self.exchanges_per_step, placement)

    def predicted_rows(self, skeleton: Skeleton, placement: Placement) -> int:
        """Return the rows that the fullest bucket needs by prediction; 0 where nothing is predicted or capacities rule.

        A step's loads are sums over microbatches and data-parallel groups; a bucket is of one.
        """
        plans = self.plans
        if not plans.predictor.seen or not self.config.moe.dropless:
            return 0
        loads = np.rint(plans.predictor.predict()).astype(np.int64)
        counters = dict(plans.planner.counters)  # a prediction is not a decision to be counted
        pair = routing.pair_loads(self.refined(skeleton, placement, loads), loads).max() / self.exchanges_per_step
        plans.planner.counters.clear()
        plans.planner.counters.update(counters)
        error = min(1.0, float(np.max(plans.predictor.error(), initial=0.0)))
        rows = bucket_rows(pair, error, self.roles.size(self.roles.model))
        return min(rows, self._most_rows(skeleton))

    def _most_rows(self, skeleton: Skeleton) -> int:
        """Return the rows that a planned bucket may have: the worst case, or what `PlannerConfig.bucket_limit` allows.

        Never fewer than without a plan.
        """
        sizes = self._sizes(dataclasses.replace(skeleton, bucket_rows=0))
        mean = sizes.top_k * sizes.tokens / self.devices
        most = math.ceil(self.config.planner.bucket_limit * mean)
        return min(max(most, sizes.bucket_rows(self.devices)), sizes.worst_rows())

    def rows_of(self, skeleton: Skeleton) -> int:
        """Return the rows of a bucket under this skeleton."""
        return self._sizes(skeleton).bucket_rows(self.devices)

    def _sizes(self, skeleton: Skeleton) -> LayerSizes:
        train, roles = self.config.train, self.roles
        tokens = train.batch_size * self.config.data.sequence_length // train.grad_accum_steps
        tokens = tokens * roles.size(roles.model) // roles.num_devices
        return layer_sizes(self.config.moe, roles, tokens, layer_plan(skeleton, roles.expert))

    def grow(self, skeleton: Skeleton, placement: Placement) -> Skeleton:
        """Return a skeleton that the placement and plans like it fit, with buckets at least as large as predicted."""
        if not fits(skeleton, placement):
            if len(placement.replicas) and skeleton.method == "none":
                skeleton = self._with_first_replicas(skeleton, placement)
            else:
                skeleton = widen(skeleton, placement)
        rows = self.predicted_rows(skeleton, placement)
        if rows > self.rows_of(skeleton):
            step = math.lcm(8, self.roles.size(self.roles.model))
            rows = min(HEADROOM * rows, self._most_rows(skeleton))
            skeleton = dataclasses.replace(skeleton, bucket_rows=step * math.ceil(rows / step))
        assert most_homes(placement) <= skeleton.bank_rows
        return skeleton

    def _with_first_replicas(self, skeleton: Skeleton, placement: Placement) -> Skeleton:
        """Return a skeleton with the transfer of this placement and at least as many slots as the given one."""
        config = self.config.planner
        method = cheapest_method(placement) if config.transfer == "auto" else config.transfer
        need = build_skeleton(placement, method=method)
        skeleton = dataclasses.replace(
            need,
            home_slots=max(need.home_slots, skeleton.home_slots),
            replica_slots=max(need.replica_slots, config.replica_slots),
            bank_rows=max(need.bank_rows, skeleton.bank_rows),
            candidates=max(need.candidates, min(placement.devices, 2 * need.candidates)),
            bucket_rows=skeleton.bucket_rows,
        )
        return self.with_slots_for_rule(skeleton)

    def planned_skeleton(self, loads: np.ndarray) -> tuple[Skeleton, Rule | None]:
        """Return what a run would compile after steps with these loads, int64 [L, D, E] each: its skeleton and rule.

        The planner sees the same loads as often as its predictor looks back.
        """
        for _ in range(self.config.planner.window):
            self.plans.observe(loads)
        placement = self.plans.propose(self.config.planner.steps_between_plans).placement
        skeleton = self.grow(self.first_skeleton(), placement)
        return skeleton, self.after_gate_rule(skeleton)


def initial_placement(config: RunConfig, roles: Roles) -> Placement:
    """Return even homes on the mesh's expert-parallel group, with its node boundary."""
    devices = roles.size(roles.expert)
    inside = max(1, roles.config.devices_per_node // roles.config.expert_shard)
    per_node = inside if devices % inside == 0 else devices
    return Placement.even(config.model.moe_layers, config.moe.num_experts, devices, per_node)


def plan_hash(skeleton: Skeleton, placement: Placement) -> int:
    """Return 31 bits of what a step runs with, for processes to compare."""
    text = placement.fingerprint() + repr(skeleton)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) & 0x7FFFFFFF


def bare_skeleton(placement: Placement) -> Skeleton:
    """Return the skeleton of a placement without replicas."""
    return build_skeleton(placement, method="none")

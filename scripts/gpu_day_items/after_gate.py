"""Item 8: what a rule after the gate takes by itself, and that the GPU decides what the CPU decides.

D = 32 devices in nodes of 8, E = 64 experts; the counts of one step, one layer and one source, on one device.
"""

from __future__ import annotations

from gpu_day_items.context import seconds_of, shown


def measure(context, planner: str):
    """Record seconds and launches of a planner's rule."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from moe_jax.cluster import Cluster
    from moe_jax.cluster.hlo import parse_module
    from moe_jax.cluster.targets import parse_target
    from moe_jax.cluster.timeline import play
    from moe_jax.moe.after_gate_rules import RULES
    from moe_jax.planning.balancer import build_planner, with_late
    from moe_jax.planning.config import PlannerConfig
    from moe_jax.planning.cost import Cost, with_late_prices
    from moe_jax.planning.placement import Placement
    from moe_jax.planning.plan_shape import build_shape, fill_tables

    devices, experts, node, replicas = context.of_size((32, 64, 8, 4), (8, 16, 4, 3))
    cluster = Cluster(
        name="day", nodes=devices // node, devices_per_node=node, flat=True, intra_bandwidth=3e9, flops=3e13
    )
    cost = Cost(cluster=cluster, model_dim=768, hidden_dim=1536, replica_slots=replicas, overlap_degree=8)
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.full(experts, 0.3))
    loads = np.stack([rng.multinomial(1024, share) for _ in range(devices)])[None]
    home = np.repeat(np.arange(devices, dtype=np.int32), experts // devices)
    even = Placement(home[None], devices=devices, devices_per_node=node)
    when = {"calibrate": True} if planner == "hecate" else {"when": "after_gate"}
    planning = build_planner(PlannerConfig(name=planner, replica_slots=replicas, **when))
    plan = planning.propose(loads, even, cost)
    shape = with_late(planning, build_shape(plan, by_node=node < devices), cost)
    name, fields = planning.late_rule(shape, with_late_prices(cost, shape.late), 1)
    tables = fill_tables(shape, plan)
    tables_here = jax.tree.map(lambda leaf: np.asarray(leaf)[1, 0], tables)
    rule, counts, holders = RULES[name](**fields), loads[0].astype(np.int32), np.asarray(tables.slot_expert)[:, 0]

    def decide(tables, counts, holders):
        return rule.decide(tables, counts, holders, jnp.int32(1), shape)

    jitted = jax.jit(decide)
    arguments = jax.tree.map(jnp.asarray, (tables_here, counts, holders))
    seconds = seconds_of({"decide": (jitted, arguments)}, rounds=context.of_size(9, 2), calls=context.of_size(10, 1))
    here = jax.tree.map(np.asarray, jitted(*arguments))
    cpu = jax.devices("cpu")[0]
    there = jax.tree.map(np.asarray, jitted(*jax.device_put(arguments, cpu)))
    pairs = zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True)
    apart = max(int(np.abs(a.astype(np.int64) - b.astype(np.int64)).max(initial=0)) for a, b in pairs)
    text = jitted.lower(*arguments).compile().as_text()
    timeline = play(parse_module(text), parse_target("h200:1x1"))
    launches, turns = sum(event.row == "compute" for event in timeline.events), text.count(" while(")
    context.record(decide_seconds=seconds["decide"], launches=launches, largest_difference_from_cpu=apart)
    equal = "equal to the CPU's" if not apart else f"tables differ from the CPU's by {apart} at most"
    context.row(
        f"{planner}: {type(rule).__name__}, D = {counts.shape[0]}, E = {counts.shape[1]}",
        f"{shown(seconds['decide'])}, {launches} launches in {turns} loops; {equal}",
    )

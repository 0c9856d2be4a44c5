"""Items 5, 6 and 8: small programs alone.

conditional: a scan of 12 turns of small kernels, with and without a conditional in each turn, both as XLA launches them
  by default and with no command buffer. What a turn takes longer with a conditional that is never taken is the constant
  `conditional` of inspect's model.
top_k, sorts: routing, top-k on exact ties, sorts and what stands around them; t = 16,384 tokens, K = 2, E = 64 on one
  device, as `moe_jax.moe.routing.route` calls them.
after_gate: what a rule after the gate takes by itself, and that the GPU decides what the CPU decides. D = 32 devices in
  nodes of 8, E = 64 experts; the counts of one step, one layer and one source, on one device.
"""

from __future__ import annotations

from gpu_day_items.context import seconds_of, shown

TURNS = 12


def conditional(context):
    """Record seconds of the four programs and the cost of one conditional."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def turn(carry, with_conditional):
        for _ in range(4):
            carry = jnp.tanh(carry @ carry)
        if with_conditional:  # its predicate is data, and never true
            carry = lax.cond(carry[0, 0] > 2.0, lambda c: jnp.tanh(c @ c) @ c, lambda c: c, carry)
        return carry

    def program(with_conditional):
        return lambda x: lax.scan(lambda c, _: (turn(c, with_conditional), None), x, None, length=TURNS)[0]

    x = jax.random.normal(jax.random.key(0), (context.of_size(128, 16),) * 2) * 0.1
    cases = {}
    for buffers, options in (("default", {}), ("none", {"xla_gpu_enable_command_buffer": ""})):
        for what in (False, True):
            name = f"{'with' if what else 'without'}, command buffers {buffers}"
            cases[name] = (jax.jit(program(what)).lower(x).compile(compiler_options=options), (x,))
    seconds = seconds_of(cases, rounds=context.of_size(15, 3), calls=context.of_size(20, 2))
    cost = {
        buffers: (seconds[f"with, command buffers {buffers}"] - seconds[f"without, command buffers {buffers}"]) / TURNS
        for buffers in ("default", "none")
    }
    context.record(times=seconds, conditional_seconds=cost, constants={"conditional": max(cost["default"], 0.0)})
    for name, took in seconds.items():
        context.row(f"{TURNS} turns {name}", shown(took))
    for buffers, took in cost.items():
        context.row(f"one conditional, command buffers {buffers}", f"{took * 1e6:.1f} us")


def _sizes(context):
    return context.of_size((16384, 2, 64), (256, 2, 8))


def _time(context, cases):
    seconds = seconds_of(cases, rounds=context.of_size(9, 2), calls=context.of_size(20, 1))
    context.record(times=seconds)
    for name, took in seconds.items():
        context.row(name, shown(took))


def top_k(context):
    """Record whether ties go to the lowest id, and how long the choice takes."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    tokens, chosen, experts = _sizes(context)
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 4, (tokens, experts)).astype(np.float32)  # many exact ties
    scores[0], scores[1, 3:] = 0.5, -np.inf
    wanted = np.argsort(-scores, axis=1, kind="stable")[:, :chosen]
    by_values = jax.jit(lambda scores: tuple(lax.top_k(scores, chosen)))
    values, ids = map(np.asarray, by_values(jnp.asarray(scores)))
    lowest = float(np.mean(np.all(ids == wanted, axis=1)))
    right = bool(np.array_equal(values, np.take_along_axis(scores, wanted, axis=1)))
    context.record(rows_with_lowest_ids=lowest, values_right=right)
    context.row(
        f"top-{chosen} of {experts}, exact ties",
        f"values {'right' if right else 'WRONG'}; ties to the lowest id in {lowest:.2%} of {tokens} rows",
    )
    sort = jax.jit(lambda scores: jnp.argsort(-scores, axis=1, stable=True)[:, :chosen])
    data = jax.random.normal(jax.random.key(0), (tokens, experts))
    _time(context, {"lax.top_k": (by_values, (data,)), "argsort, stable, first K": (sort, (data,))})


def sorts(context):
    """Record seconds of sorts, of the ranks by them, and of `route` and `pack` whole."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from moe_jax.moe.routing import Choice, pack, rank_within, route
    from moe_jax.parallel.static_sizes import bucket_layout

    tokens, chosen, experts = _sizes(context)
    count = tokens * chosen
    ids = jax.random.randint(jax.random.key(0), (tokens, chosen), 0, experts)
    flat = ids.reshape(-1)
    index = jnp.arange(count, dtype=jnp.int32)
    choice = Choice(expert_ids=ids, weights=jnp.ones(ids.shape), keep_mask=jnp.ones(ids.shape, bool))

    def whole(choice):
        return route(choice, jnp.zeros_like(choice.expert_ids), choice.expert_ids, 1, experts)

    routing = jax.jit(whole)(choice)
    edges = routing.start[::experts]
    context.record(rows_of_the_largest_bucket=int(jnp.max(edges[1:] - edges[:-1])))
    _time(
        context,
        {
            f"sort_key_val, {count} keys": (jax.jit(lambda k: lax.sort_key_val(k, index)), (flat,)),
            "the same, not stable": (jax.jit(lambda k: lax.sort_key_val(k, index, is_stable=False)), (flat,)),
            "argsort, stable": (jax.jit(lambda k: jnp.argsort(k, stable=True)), (flat,)),
            "rank_within": (jax.jit(rank_within), (flat,)),
            "route": (jax.jit(whole), (choice,)),
            "pack": (jax.jit(lambda r: pack(r, 0, bucket_layout(count, 1), chosen, experts)), (routing,)),
        },
    )


def after_gate(context, planner: str):
    """Record seconds and launches of a planner's rule."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from moe_jax.cluster import UNNAMED
    from moe_jax.cluster.hlo import parse_module
    from moe_jax.cluster.prices import Prices
    from moe_jax.cluster.targets import parse_target
    from moe_jax.cluster.timeline import play
    from moe_jax.moe.after_gate import decide_by
    from moe_jax.planning.balancer import build_planner
    from moe_jax.planning.config import PlannerConfig
    from moe_jax.planning.cost import Cost, LayerPrices
    from moe_jax.planning.hecate import Hecate
    from moe_jax.planning.placement import Placement
    from moe_jax.planning.plan import with_rule
    from moe_jax.planning.plan_shape import build_shape, fill_tables

    devices, experts, node, replicas = context.of_size((32, 64, 8, 4), (8, 16, 4, 3))
    cluster = UNNAMED.sized(devices // node, node)
    prices = LayerPrices(cluster=cluster, model_dim=768, hidden_dim=1536)
    cost = Cost(prices=prices, replica_slots=replicas)
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.full(experts, 0.3))
    loads = np.stack([rng.multinomial(1024, share) for _ in range(devices)])[None]
    home = np.repeat(np.arange(devices, dtype=np.int32), experts // devices)
    even = Placement(home[None], devices=devices, devices_per_node=node)
    when, tau = "ahead" if planner == "hecate" else "after_gate", (Hecate(overlap_degree=8),)
    planning = build_planner(PlannerConfig(name=planner, replica_slots=replicas, when=when, options=tau))
    plan = planning.propose(loads, even, cost)
    shape = with_rule(planning, build_shape(plan, by_node=node < devices), cost)
    rule = shape.after_gate
    tables = fill_tables(shape, plan)
    tables_here = jax.tree.map(lambda leaf: np.asarray(leaf)[1, 0], tables)
    counts, holders = loads[0].astype(np.int32), np.asarray(tables.slot_expert)[:, 0]

    def decide(tables, counts, holders):
        return decide_by(rule, tables, counts, holders, jnp.int32(1), shape)

    jitted = jax.jit(decide)
    arguments = jax.tree.map(jnp.asarray, (tables_here, counts, holders))
    seconds = seconds_of({"decide": (jitted, arguments)}, rounds=context.of_size(9, 2), calls=context.of_size(10, 1))
    here = jax.tree.map(np.asarray, jitted(*arguments))
    cpu = jax.devices("cpu")[0]
    there = jax.tree.map(np.asarray, jitted(*jax.device_put(arguments, cpu)))
    pairs = zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True)
    apart = max(int(np.abs(a.astype(np.int64) - b.astype(np.int64)).max(initial=0)) for a, b in pairs)
    text = jitted.lower(*arguments).compile().as_text()
    timeline = play(parse_module(text), Prices(parse_target("h200:1x1")))
    launches, turns = sum(row == "compute" for row, *_ in timeline.events), text.count(" while(")
    context.record(decide_seconds=seconds["decide"], launches=launches, largest_difference_from_cpu=apart)
    equal = "equal to the CPU's" if not apart else f"tables differ from the CPU's by {apart} at most"
    context.row(
        f"{planner}: {type(rule).__name__}, D = {counts.shape[0]}, E = {counts.shape[1]}",
        f"{shown(seconds['decide'])}, {launches} launches in {turns} loops; {equal}",
    )

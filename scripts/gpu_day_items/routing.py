"""Item 6: routing alone: top-k on exact ties, the ways to search sorted keys, sorts and what stands around them.

t = 16,384 tokens, K = 2, E = 64 on one device, as `moe_jax.moe.routing.route` calls them.
"""

from __future__ import annotations

from gpu_day_items.context import seconds_of, shown


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


def searchsorted(context):
    """Record seconds of every method on the keys of `route`, all of which must agree with NumPy."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    tokens, chosen, experts = _sizes(context)
    keys = np.sort(np.random.default_rng(0).integers(0, experts, tokens * chosen)).astype(np.int32)
    queries = np.arange(experts + 1, dtype=np.int32)
    wanted = np.searchsorted(keys, queries)
    arguments = (jnp.asarray(keys), jnp.asarray(queries))
    cases = {}
    for method in ("scan", "scan_unrolled", "sort", "compare_all"):
        function = jax.jit(lambda keys, queries, method=method: jnp.searchsorted(keys, queries, method=method))
        agrees = bool(np.array_equal(np.asarray(function(*arguments)), wanted))
        context.record(**{method: agrees})
        if not agrees:
            context.row(f"searchsorted {method}", "WRONG")
        cases[f"searchsorted {method}, {len(queries)} of {len(keys)}"] = (function, arguments)
    _time(context, cases)


def sorts(context):
    """Record seconds of the sort of `route`, of other ways to the same ranks, and of `route` and `pack` whole."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from moe_jax.moe.routing import Choice, pack, rank_within, route
    from moe_jax.parallel.bucket_rows import bucket_layout

    tokens, chosen, experts = _sizes(context)
    count = tokens * chosen
    ids = jax.random.randint(jax.random.key(0), (tokens, chosen), 0, experts)
    flat = ids.reshape(-1)
    index = jnp.arange(count, dtype=jnp.int32)
    choice = Choice(expert_ids=ids, weights=jnp.ones(ids.shape), keep_mask=jnp.ones(ids.shape, bool))

    def by_counting(keys):
        mine = keys[:, None] == jnp.arange(experts, dtype=keys.dtype)
        return jnp.take_along_axis(jnp.cumsum(mine, axis=0, dtype=jnp.int32), keys[:, None], axis=1)[:, 0] - 1

    def whole(choice):
        return route(choice, jnp.zeros_like(choice.expert_ids), choice.expert_ids, 1, experts)

    routing = jax.jit(whole)(choice)
    ranks = jax.jit(rank_within)(flat), jax.jit(by_counting)(flat)
    edges = routing.start[::experts]
    context.record(rows_of_the_largest_bucket=int(jnp.max(edges[1:] - edges[:-1])))
    if not bool(jnp.array_equal(*ranks)):
        raise AssertionError("ranks by sorting and by counting differ")
    _time(
        context,
        {
            f"sort_key_val, {count} keys": (jax.jit(lambda k: lax.sort_key_val(k, index)), (flat,)),
            "the same, not stable": (jax.jit(lambda k: lax.sort_key_val(k, index, is_stable=False)), (flat,)),
            "argsort, stable": (jax.jit(lambda k: jnp.argsort(k, stable=True)), (flat,)),
            "rank_within": (jax.jit(rank_within), (flat,)),
            "ranks by counting [A, E]": (jax.jit(by_counting), (flat,)),
            "route": (jax.jit(whole), (choice,)),
            "pack": (jax.jit(lambda r: pack(r, 0, bucket_layout(count, 1), chosen, experts)), (routing,)),
        },
    )

"""Plain expert parallelism: the same numbers for every bucket size, in the passes and bytes that the formulas say.

Tokens, weights, cotangents and experts lie on grids of 2^-4, so that every sum in float64 is exact and results are
compared to the bit. The expert with id e multiplies its rows by scale[e].
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe_jax.cluster.layer_seconds import FORMULAS
from moe_jax.errors import UserError
from moe_jax.moe.routing import Choice
from moe_jax.moe.schedules import LayerSizes, build_schedule, register, schedule_record, schedules
from moe_jax.moe.schedules.passes import add_later_passes
from moe_jax.moe.tables import even_tables
from moe_jax.parallel.bucket_rows import BucketRows
from moe_jax.parallel.mesh import MeshConfig, build_mesh

TOKENS, TOP_K, EXPERTS, DIM = 16, 2, 8, 5  # tokens of one device
DEVICES = 4


def roles_of(**sizes):
    return build_mesh(MeshConfig(**sizes), jax.devices()[:DEVICES])


def sizes_of(roles, slack=1.5, capacity=None):
    groups = EXPERTS // roles.size(roles.expert)
    return LayerSizes(
        tokens=TOKENS, top_k=TOP_K, num_experts=EXPERTS, groups=groups, capacity=capacity, bucket_slack=slack
    )


def grid(rng, shape):
    return rng.integers(-16, 17, shape) / 16


def draw(skew):
    """Return x [N, M], scale [E], ids [N, K], weights [N, K], keep_mask [N, K], cotangent [N, M] of all devices."""
    rng = np.random.default_rng(0)
    total = DEVICES * TOKENS
    ids = np.argsort(rng.random((total, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    keep_mask = np.ones(ids.shape, bool)
    if skew == "all_to_one":  # both choices of every token on device 2
        ids[:] = [4, 5]
    elif skew == "one_source":  # those of device 3's tokens alone
        ids[3 * TOKENS :] = [5, 4]
    elif skew == "none":
        keep_mask[:] = False
    elif skew == "some":
        keep_mask = rng.random(ids.shape) < 0.5
    return grid(rng, (total, DIM)), grid(rng, (EXPERTS,)), ids, grid(rng, ids.shape), keep_mask, grid(rng, (total, DIM))


@functools.cache
def make_step(roles, name, sizes):
    """Return step(x, scale, ids, weights, keep_mask, cotangent) -> (gradients of x, scale and weights, (y, passes))."""
    schedule = build_schedule(name, roles, sizes)
    tables = even_tables(1, EXPERTS, roles.size(roles.expert))

    def body(x, scale, ids, weights, keep_mask, token_ids, tables):
        def experts(rows, group_sizes):
            row = jnp.arange(rows.shape[0])
            group = jnp.searchsorted(jnp.cumsum(group_sizes), row, side="right")
            return rows * jnp.take(scale, group, mode="fill", fill_value=0)[:, None]

        layer = jax.tree.map(lambda array: array[0, 0], tables)
        tokens, _ = schedule.enter(x, token_ids)
        assert tokens.shape[0] == TOKENS
        routed = schedule.route(tokens, Choice(expert_ids=ids, weights=weights, keep_mask=keep_mask), layer)
        one_pass = functools.partial(schedule.run_pass, routed, experts=experts)
        y = add_later_passes(one_pass(0), one_pass, routed.passes, schedule.run_passes)
        return schedule.leave(y), routed.passes

    rows, by_expert = P(roles.dense), P(roles.expert)
    in_specs = (rows, by_expert, rows, rows, rows, rows, by_expert)
    sharded = jax.shard_map(body, mesh=roles.mesh, in_specs=in_specs, out_specs=(rows, P()))

    def loss(x, scale, ids, weights, keep_mask, cotangent):
        token_ids = jnp.arange(x.shape[0], dtype=jnp.int32)
        y, passes = sharded(x, scale, ids, weights, keep_mask, token_ids, tables)
        return jnp.sum(y * cotangent), (y, passes)

    return jax.jit(jax.grad(loss, (0, 1, 3), has_aux=True))


def naive(x, scale, ids, weights, keep_mask, cotangent):
    """Return y and the gradients of x, scale and weights, token after token."""
    y, d_x, d_scale, d_weights = np.zeros_like(x), np.zeros_like(x), np.zeros_like(scale), np.zeros_like(weights)
    for t in range(len(x)):
        for k in range(TOP_K):
            if keep_mask[t, k]:
                e = ids[t, k]
                y[t] += weights[t, k] * scale[e] * x[t]
                d_x[t] += weights[t, k] * scale[e] * cotangent[t]
                d_scale[e] += weights[t, k] * np.dot(cotangent[t], x[t])
                d_weights[t, k] = scale[e] * np.dot(cotangent[t], x[t])
    return y, d_x, d_scale, d_weights


def fullest_bucket(ids, keep_mask, groups):
    """Return the most rows that any source sends to any destination."""
    most = 0
    for source in range(DEVICES):
        mine = slice(source * TOKENS, (source + 1) * TOKENS)
        destinations = (ids[mine] // groups)[keep_mask[mine]]
        most = max(most, *np.bincount(destinations, minlength=DEVICES))
    return most


# K t / D = 8 rows are the mean of a bucket, 32 the worst case; slack 0.5 and 1 give 8 rows (rounded up), 2 gives 16,
# 3 gives 24, 4 gives 32 and a program without a branch.
ROWS_OF_SLACK = {0.5: 8, 2: 16, 3: 24, 4: 32}


@pytest.mark.parametrize("skew", ["even", "all_to_one", "one_source", "some", "none"])
@pytest.mark.parametrize("slack", ROWS_OF_SLACK)
def test_deepspeed_any_bucket(slack, skew):
    """Loss and gradients do not know the bucket's size; the passes are those of the fullest bucket on any device."""
    with jax.enable_x64(True):
        roles = roles_of()
        sizes = sizes_of(roles, slack)
        assert sizes.bucket_rows(DEVICES) == BucketRows.even(ROWS_OF_SLACK[slack])
        drawn = draw(skew)
        grads, (y, passes) = make_step(roles, "deepspeed", sizes)(*drawn)
    for mine, wanted in zip((y, *grads), naive(*drawn), strict=True):
        assert mine.dtype == np.float64
        np.testing.assert_array_equal(mine, wanted)
    fullest = fullest_bucket(drawn[2], drawn[4], sizes.groups)
    assert passes == max(1, -(-fullest // ROWS_OF_SLACK[slack]))
    assert passes <= -(-sizes.worst_rows() // ROWS_OF_SLACK[slack])
    if skew in ("all_to_one", "one_source"):
        assert fullest == sizes.worst_rows() == 32


@pytest.mark.parametrize(
    "tokens, top_k, groups, capacity, slack, destinations, rows, worst",
    [
        (64, 2, 2, None, 1.5, 8, 24, 128),  # 1.5 * 2 * 64 / 8
        (64, 2, 2, None, 1.0, 3, 48, 128),  # ceil(42.67) = 43, rounded up to 8
        (64, 2, 1, None, 1.5, 2, 64, 64),  # 96, but one expert meets each token once
        (64, 2, 8, None, 1.5, 1, 128, 128),  # one destination gets everything
        (64, 2, 2, 10, 1.5, 8, 20, 128),  # two experts with ten slots each
        (8, 1, 4, 10, 1.5, 8, 8, 8),  # never more than there are
    ],
)
def test_bucket_rows(tokens, top_k, groups, capacity, slack, destinations, rows, worst):
    sizes = LayerSizes(
        tokens=tokens,
        top_k=top_k,
        num_experts=groups * destinations,
        groups=groups,
        capacity=capacity,
        bucket_slack=slack,
    )
    assert (sizes.bucket_rows(destinations), sizes.worst_rows()) == (BucketRows.even(rows), worst)


@pytest.mark.parametrize(
    "sizes, message",
    [
        (
            {"expert": 4},
            r"MoEConfig.schedule \('dp'\) needs MeshConfig.expert = 1, not 4: every device computes all experts; set "
            r"MeshConfig.expert = 1 and MeshConfig.data = 4",
        ),
        ({"data": 2, "expert": 1, "expert_shard": 2}, r"needs MeshConfig.expert_shard = 1, not 2"),
        ({"data": 4, "expert": 1, "model": 2}, r"needs MeshConfig.model = 1, not 2"),
    ],
)
def test_dp_errors(sizes, message):
    roles = roles_of(**sizes)
    with pytest.raises(UserError, match=message):
        build_schedule("dp", roles, sizes_of(roles))


def test_registry():
    assert {"deepspeed", "dp"} <= set(schedules())
    roles = roles_of()
    with pytest.raises(UserError, match=r"MoEConfig.schedule \('magic'\) is unknown; choose one of deepspeed, dp"):
        build_schedule("magic", roles, sizes_of(roles))
    with pytest.raises(AssertionError, match="'dp' is registered twice"):
        register("dp")(lambda roles, sizes, options: None)


def test_every_record_names_what_exists():
    for name in schedules():
        record = schedule_record(name)
        assert set(record.chooses_from or (name,)) <= set(FORMULAS)
        assert record.on_mesh(1, 1).name in ("s1", name) and record.on_mesh(2, 2) is record

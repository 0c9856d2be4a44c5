"""One MoE layer under any schedule and mesh of eight devices, next to the one-device reference.

The layer is the real one (gate, experts, bank and grad_sink); the loss is a fixed weighting of its outputs plus the
gate losses, so that every gradient is at a general point.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from support.options import layer_config

from moe_jax.moe.bank import open_grad_sink, with_grad_sink
from moe_jax.moe.build import make_moe
from moe_jax.moe.reference import reference_moe
from moe_jax.moe.routers import RouterInputs, balance_loss
from moe_jax.moe.routing import even_tables, local
from moe_jax.moe.schedule import find_schedule
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.parallel.ordering import wait_for
from moe_jax.parallel.sharding import expert_specs
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import build_shape, fill_tables

EXPERTS, TOKENS, DIM, HIDDEN = 8, 64, 4, 8  # all devices together
PAIRS = [(mp, esp) for mp in (1, 2, 4) for esp in (1, 2, 4)]


def roles_of(model, shards, data=1):
    config = MeshConfig(data=data, expert=8 // shards // data, expert_shard=shards, model=model)
    return build_mesh(config, jax.devices()[:8])


def plan_of(roles, rows):
    """Return the shape of even homes whose buckets have these rows."""
    devices = roles.size(roles.expert)
    start = Placement.even(1, EXPERTS, devices, roles.members_per_node)
    return dataclasses.replace(build_shape(start), bucket_rows=rows)


def moe_config(schedule, top_k=2, capacity=False, **changes):
    limits = {"capacity_factor": 1.0, "min_capacity": 1} if capacity else {}
    return layer_config(**{"num_experts": EXPERTS, "top_k": top_k, "schedule": schedule, **limits, **changes})


def draw(skewed, dtype=np.float64, tokens=TOKENS):
    """Return x [N, M], w_gate [M, E], experts {name: [E, ...]}, cotangent [N, M]."""
    rng = np.random.default_rng(5)
    x, w_gate = rng.normal(size=(tokens, DIM)), rng.normal(size=(DIM, EXPERTS))
    if skewed:
        x[:, 0] = np.abs(x[:, 0]) + 1
        w_gate[0] += np.where(np.arange(EXPERTS) == 5, 3.0, 0.0)
    experts = {"w_in": rng.normal(size=(EXPERTS, DIM, HIDDEN)), "w_out": rng.normal(size=(EXPERTS, HIDDEN, DIM))}
    arrays = (x, w_gate, experts, rng.normal(size=x.shape))
    return jax.tree.map(lambda a: np.asarray(a, dtype), arrays)


def make_loss(config, roles, tokens=TOKENS, plan=None, noise_key=None):
    """Return loss(x, w_gate, experts, cotangent) -> (loss, (y, loads [sources, E], passes)) on global arrays."""
    members = roles.size(roles.expert)
    tables = even_tables(1, EXPERTS, members)
    if plan is not None:
        tables = fill_tables(plan, Placement.even(1, EXPERTS, members, roles.members_per_node))
    outside = tuple(axis for axis in roles.all if axis not in roles.expert)

    def body(x, w_gate, bank, grad_sink, cotangent, tables):
        tables = local(tables)
        grad_sink, _ = open_grad_sink(grad_sink, tables.home_row[0])
        layer = jax.tree.map(lambda array: array[0], tables)
        ids = lax.axis_index(roles.dense) * x.shape[0] + jnp.arange(x.shape[0], dtype=jnp.int32)
        apply = make_moe(config, roles, x, "gelu", plan)
        y, stats, passes = apply(x, w_gate, RouterInputs(noise_key, ids, layer), bank, grad_sink)
        probability, squared = lax.psum((stats.probability, stats.squared_logsumexp), roles.dense)
        loads = lax.psum(stats.counts, outside)
        total = lax.psum(stats.counts, roles.all)
        # a model's backward starts after its forward's sums: the cotangent here is known before
        cotangent = wait_for(cotangent, (passes, loads, total, probability, squared))
        gates = balance_loss(total, probability, tokens, config.top_k) + squared / tokens
        return lax.psum(jnp.sum(y * cotangent), roles.dense) + gates, y, loads[None], passes

    specs = expert_specs({"w_in": (1, 1, 1), "w_out": (1, 1, 1)}, roles, 0, None)[0]
    rows = P(roles.dense)
    sharded = jax.shard_map(
        body,
        mesh=roles.mesh,
        in_specs=(rows, P(), specs, specs, rows, P(roles.expert)),
        out_specs=(P(), rows, P(roles.expert), P()),
    )

    def loss(x, w_gate, experts, cotangent):
        bank, grad_sink = with_grad_sink(experts)
        value, y, loads, passes = sharded(x, w_gate, bank, grad_sink, cotangent, tables)
        return value, (y, loads, passes)

    return loss


def drop_groups(schedule, roles):
    """Return how many groups of tokens are gated each on their own."""
    return roles.size(roles.dense) if find_schedule(schedule).gates_group else roles.mesh.size


@functools.cache
def make_reference(config, groups):
    def loss(x, w_gate, experts, cotangent):
        y, balance, z, loads = reference_moe(x, w_gate, experts, config, drop_groups=groups)
        return jnp.sum(y * cotangent) + balance + z, (y, loads)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


def reference(config, groups, skewed):
    """Return ((loss, (y, loads)), gradients) of the one-device layer."""
    plain = dataclasses.replace(
        config, schedule="deepspeed", transport="all_to_all", bucket_slack=1.5, gather="saa", grouped_matmul="auto"
    )
    return make_reference(plain, 1 if config.dropless else groups)(*draw(skewed))


def assert_near(got, want, tolerance):
    """Every array is within `tolerance` of the largest entry of the wanted one; return the largest such error."""
    errors = {}
    for (path, a), b in zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        errors[jax.tree_util.keystr(path)] = np.max(np.abs(a - b)) / max(np.max(np.abs(a)), 1e-20)
    assert max(errors.values()) <= tolerance, errors
    return max(errors.values())

"""The token rule at sizes where num * n does not fit 32 bits, against Python's integers; and such sizes end to end."""

import bisect
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe_jax.errors import UserError
from moe_jax.moe import MoEConfig
from moe_jax.moe.bank import fetch_replicas
from moe_jax.moe.build import make_moe
from moe_jax.moe.routers import RouterInputs
from moe_jax.moe.routing import Choice, Tables, destinations, local, share_of
from moe_jax.moe.schedule import LayerSizes, build_schedule
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.planning.balanced import Levelling
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import build_shape, fill_tables

COUNTS = [0, 1, 2, 3, 65_535, 65_536, 65_537, 70_000, 131_072, 1 << 20, (1 << 24) + 1, (1 << 31) - 1, (1 << 32) - 1]


@pytest.mark.parametrize("den", [1, 2, 3, 7, 64, 1000, 65_535, 65_536])
def test_share_of_equals_python_integers(den):
    nums = sorted({0, 1, den // 3, den // 2, den - 1, den})
    grid = np.array([(num, count) for num in nums for count in COUNTS], np.uint32)
    got = jax.jit(share_of)(grid[:, 0], np.uint32(den), grid[:, 1])
    assert got.dtype == jnp.uint32
    assert got.tolist() == [int(num) * int(count) // den for num, count in grid]


@pytest.mark.parametrize("count", [65_535, 65_536, 70_000, 1 << 20])
def test_destinations_split_any_number_of_choices(count):
    # expert 0: 30% to device 0, the rest to device 1; devices 2 and 3 do not hold it, and their groups are expert 1's
    nums, den = [19_661, 65_536, 65_536, 65_536], 65_536
    tables = Tables(
        dest_slot=jnp.array([[0, 1, 2, 3], [2, 3, 2, 3]], jnp.int32),
        dest_num=jnp.array([nums, [1, 2, 2, 2]], jnp.uint32),
        dest_den=jnp.array([den, 2], jnp.uint32),
        home_row=jnp.zeros((1,), jnp.int32),
    )
    ids = jnp.concatenate([jnp.zeros((count, 1), jnp.int32), jnp.ones((4, 1), jnp.int32)])  # 4 choices of expert 1
    choice = Choice(expert_ids=ids, weights=jnp.ones(ids.shape), keep_mask=jnp.ones(ids.shape, bool))
    device, group = jax.jit(destinations, static_argnums=2)(tables, choice, 1)
    edges = [num * count // den for num in nums]
    want = [bisect.bisect_right(edges, rank) for rank in range(count)] + [2, 2, 3, 3]
    np.testing.assert_array_equal(device[:, 0], want)
    np.testing.assert_array_equal(group, 0)


def test_layer_with_70000_choices_of_one_expert():
    """Every token of four sources chooses expert 1, whose one replica takes half of them by a rule after the gate."""
    devices, tokens, dim = 4, 70_000, 4
    roles = build_mesh(MeshConfig(expert=devices), jax.devices()[:devices])
    placement = Placement(
        np.arange(devices, dtype=np.int32)[None], np.array([[0, 1, 3]], np.int32), devices=devices,
        devices_per_node=devices,
    )  # fmt: skip
    shape = dataclasses.replace(build_shape(placement), candidates=devices, after_gate=Levelling(sweeps=4))
    config = MoEConfig(num_experts=devices, top_k=1, schedule="s1", bucket_slack=2.0)

    def body(x, w_gate, bank, tables):
        here = jax.tree.map(lambda array: array[0], local(tables))
        replicas = fetch_replicas(bank, {n: jnp.zeros_like(v) for n, v in bank.items()}, here, shape, roles.expert, x)
        inputs = RouterInputs(None, jnp.arange(tokens, dtype=jnp.int32), here)
        y, stats, _ = make_moe(config, roles, x, "gelu", shape)(x, w_gate, inputs, bank, {}, replicas)
        return y, stats.counts[None]

    rows, held = P(roles.all), P(roles.expert)
    layer = jax.jit(jax.shard_map(body, mesh=roles.mesh, in_specs=(rows, P(), held, held), out_specs=(rows, rows)))
    rng = np.random.default_rng(0)
    bank = {"w_in": rng.normal(size=(devices, dim, dim)), "w_out": rng.normal(size=(devices, dim, dim))}
    bank = {name: leaf.astype(np.float32) for name, leaf in bank.items()}
    x = rng.normal(size=(devices * tokens, dim)).astype(np.float32)
    x[:, 0] = 1
    w_gate = np.zeros((dim, devices), np.float32)
    w_gate[0, 1] = 9
    y, counts = layer(x, w_gate, bank, fill_tables(shape, placement))
    np.testing.assert_array_equal(counts, [[0, tokens, 0, 0]] * devices)
    want = np.asarray(jax.nn.gelu(x @ bank["w_in"][1]) @ bank["w_out"][1])
    np.testing.assert_allclose(y, want, atol=1e-4)  # float32


def test_more_choices_than_int32_counts_are_refused():
    roles = build_mesh(MeshConfig(expert=4), jax.devices()[:4])
    moe = MoEConfig(num_experts=4, top_k=2, bucket_slack=1.0)
    most = LayerSizes(config=moe, tokens=(1 << 28) - 1, groups=1)  # 4 x 2 x (2^28 - 1) = 2^31 - 8
    build_schedule("s1", roles, most)
    with pytest.raises(
        UserError, match=r"2147483648 choices of experts in a layer must be at most 2147483647, so that"
    ):
        build_schedule("s1", roles, dataclasses.replace(most, tokens=1 << 28))

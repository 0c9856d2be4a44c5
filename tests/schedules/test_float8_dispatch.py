"""Layers whose rows travel in float8: against the one-device reference, off by default."""

import functools

import jax
import numpy as np
import pytest
from support.float8_oracle import straight_through
from support.layer_cases import DIM, assert_near, draw, make_loss, moe_config, roles_of
from support.marks import slow_but

from moe_jax.cluster import HOST, Cluster
from moe_jax.cluster.layer_seconds import layer_seconds
from moe_jax.errors import UserError
from moe_jax.moe import reference
from moe_jax.moe.build import check_float8
from moe_jax.moe.choosers import parm_seconds
from moe_jax.moe.schedule import LayerSizes, layer_shape, layout_of
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.planning.cost import LayerPrices

E4M3 = "float8_e4m3"
# schedule, (MP, ESP) of eight devices or None for one, more fields
CASES = {
    "deepspeed": ("deepspeed", (1, 1), {}),
    "s1_later_passes": ("s1", (2, 2), {"bucket_slack": 0.5}),
    "s2": ("s2", (2, 2), {}),
    "deduplicated": ("deduplicated", (1, 2), {"bucket_slack": 0.5}),
    "two_level": ("deepspeed", (2, 2), {"transport": "two_level"}),
    "coordinated": ("s1", (1, 2), {"transport": "coordinated"}),
    "one_device": ("s1", None, {}),
}


def mesh_of(pair, transport="all_to_all"):
    if pair is None:
        return build_mesh(MeshConfig(expert=1), jax.devices()[:1])
    if transport == "two_level":
        return build_mesh(MeshConfig(model=pair[0], expert_shard=pair[1], devices_per_node=4), jax.devices())
    return roles_of(*pair)


@functools.cache
def wanted():
    """Return ((loss, (y, loads)), gradients) of the reference, whose experts read quantised rows."""
    config, expert = moe_config("deepspeed"), reference.reference_expert

    def loss(x, w_gate, experts, cotangent):
        y, balance, z, loads = reference.reference_moe(x, w_gate, experts, config)
        return jax.numpy.sum(y * cotangent) + balance + z, (y, loads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "reference_expert", lambda x, weights: expert(straight_through(x), weights))
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*draw(False))


@pytest.mark.parametrize("name", slow_but(CASES, "s1_later_passes", "deduplicated"))
def test_layer_equals_the_reference_in_float8(name):
    schedule, pair, more = CASES[name]
    config = moe_config(schedule, dispatch_dtype=E4M3, **more)
    with jax.enable_x64(True):
        loss = make_loss(config, mesh_of(pair, config.transport))
        (value, (y, _, passes)), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*draw(False))
        assert int(passes) > 1 or "later" not in name
        (want, (want_y, _)), want_gradients = wanted()
        assert_near((value, y, gradients), (want, want_y, want_gradients), 1e-10)
        plain = reference.reference_moe(*draw(False)[:3], config)[0]
        assert 1e-3 < np.abs(y - plain).max() / np.abs(plain).max() < 0.2  # and it was rounded


def test_bad_input_is_refused():
    with pytest.raises(UserError, match=r"MoEConfig.dispatch_dtype \('fp8'\) must be one of 'compute', 'float8_e4m3'"):
        moe_config("s1", dispatch_dtype="fp8")
    for schedule in ("pairwise", "ring", "dp"):
        with pytest.raises(UserError, match=f"run in one piece, not '{schedule}'.* deepspeed, parm"):
            check_float8(moe_config(schedule, dispatch_dtype=E4M3), DIM)
    with pytest.raises(UserError, match=r"MoEConfig.dispatch_dtype \('float8_e4m3'\) needs the model dim \(200\)"):
        check_float8(moe_config("s1", dispatch_dtype=E4M3), 200)
    check_float8(moe_config("parm", dispatch_dtype=E4M3), 768)


def test_smaller_rows_are_charged_as_such():
    """M = 768 in bfloat16: 784 bytes instead of 1,536, in one of a forward's two exchanges."""
    roles = roles_of(2, 2)
    both = [
        LayerSizes(config=moe_config("parm"), tokens=64, groups=2, row_bytes=1536, sent_bytes=sent) for sent in (0, 784)
    ]
    plain, less = (parm_seconds(roles, sizes, HOST.on_mesh(8, 8)) for sizes in both)
    rows = 2 * layout_of(roles, both[0].split(2).bucket_rows(4)).total  # to both shards of an expert
    saved = rows * (1536 - 784) * 1e-9
    assert plain["s1"] - less["s1"] == pytest.approx(7 / 8 * saved) and less["s2"] < plain["s2"]
    fits = {name: (0, 1e-9) for name in ("all_to_all:8", "all_gather:2", "gate", "regroup", "call")}
    cluster = Cluster(fits=fits)
    shapes = [layer_shape("s1", roles, sizes) for sizes in both]
    seconds = [layer_seconds(shape, None, cluster).communication for shape in shapes]
    assert seconds[0] - seconds[1] == pytest.approx(saved)
    layer = {"cluster": Cluster(inter_bandwidth=1e9), "model_dim": 768, "hidden_dim": 1536, "dtype_bytes": 2}
    both = [LayerPrices(**layer, sent_bytes=sent) for sent in (None, 784)]
    assert [prices.exchanged_bytes for prices in both] == [1536, (3 * 1536 + 784) / 4]

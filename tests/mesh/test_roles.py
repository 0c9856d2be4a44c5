"""Which devices form which group: every factorisation of eight devices against the definition, and every refusal."""

import itertools

import jax
import numpy as np
import pytest

from moe_jax.errors import UserError
from moe_jax.parallel.mesh import MeshConfig, build_mesh, mesh_axes

SIZES = [  # (data, expert, expert_shard, model): all powers of two on eight devices, model from 1 to 8
    (data, expert, 8 // (data * expert), model)
    for data, expert, model in itertools.product((1, 2, 4, 8), repeat=3)
    if data * expert <= 8
]


def config_of(sizes):
    data, expert, shard, model = sizes
    return MeshConfig(data=data, expert=expert, expert_shard=shard, model=model)


def groups(roles, axes):
    """Return the device ids of each group that spans `axes`: [groups, members], members in the order of the axes."""
    ids = np.vectorize(lambda device: device.id)(roles.mesh.devices)
    names = roles.mesh.axis_names
    inside = [names.index(axis) for axis in axes]
    outside = [i for i in range(len(names)) if i not in inside]
    return ids.transpose(outside + inside).reshape(-1, roles.size(axes))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_groups_follow_the_device_index(sizes):
    """Device (d, e, s) has index (d EP + e) ESP + s; an MP group is a run of `model` indices."""
    data, expert, shard, model = sizes
    roles = build_mesh(config_of(sizes), jax.devices())
    ids = np.arange(8).reshape(data, expert, shard)
    np.testing.assert_array_equal(sorted(groups(roles, roles.data).tolist()), sorted(ids.reshape(data, -1).T.tolist()))
    np.testing.assert_array_equal(groups(roles, roles.expert), ids.transpose(0, 2, 1).reshape(-1, expert))
    np.testing.assert_array_equal(groups(roles, roles.expert_shard), ids.reshape(-1, shard))
    np.testing.assert_array_equal(groups(roles, roles.model), np.arange(8).reshape(-1, model))
    np.testing.assert_array_equal(groups(roles, roles.all), [np.arange(8)])
    # dense data parallelism: the same place in every MP group
    np.testing.assert_array_equal(groups(roles, roles.dense), np.arange(8).reshape(-1, model).T)
    assert roles.mesh.size == 8 and set(roles.dense) | set(roles.model) == set(roles.all)


def test_what_is_not_given_takes_what_is_left():
    roles = build_mesh(MeshConfig(data=2), jax.devices())
    assert roles.config.expert == 4 and roles.config.devices_per_node == 8


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"expert": 0}, r"MeshConfig.expert \(0\) must be at least 1, or -1"),
        ({"data": 0}, r"MeshConfig.data \(0\) must be at least 1"),
        ({"expert_shard": -2}, r"MeshConfig.expert_shard \(-2\) must be at least 1"),
        ({"model": 0}, r"MeshConfig.model \(0\) must be at least 1"),
        ({"devices_per_node": -1}, r"MeshConfig.devices_per_node \(-1\) must be 0 "),
        ({"data": 3}, r"8 devices cannot be split into MeshConfig.data \(3\)"),
        ({"data": 2, "expert": 2, "expert_shard": 4}, r"\(4\) = 16, but there are 8 devices; .* run on 16 devices"),
        ({"model": 3}, r"MeshConfig.model \(3\) must divide the 8 devices"),
        ({"devices_per_node": 3}, r"MeshConfig.devices_per_node \(3\) must divide the 8 devices"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        build_mesh(MeshConfig(**fields), jax.devices())


def test_model_parallelism_that_cuts_no_axis_evenly_is_refused():
    for expert, shard, model in ((2, 3, 2), (3, 2, 3)):
        with pytest.raises(UserError, match=rf"MeshConfig.model \({model}\) must be a multiple or a divisor of"):
            mesh_axes(MeshConfig(expert=expert, expert_shard=shard, model=model), 6)

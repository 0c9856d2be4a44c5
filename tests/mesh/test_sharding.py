"""Where every leaf lies."""

import jax
from jax.sharding import PartitionSpec as P

from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.parallel.sharding import dense_specs, expert_specs


def roles_of(**sizes):
    return build_mesh(MeshConfig(**sizes), jax.devices())


# Outputs: `matrix` stacked over three layers, with its last dim split by the MP group; `vector` has five elements,
# which no device count divides; `table` stands alone.
SHAPES = {"matrix": (3, 16, 24), "table": (40, 8), "vector": (3, 5)}
MODEL_DIMS = {"matrix": 1, "table": -1, "vector": -1}
STACKED = {"matrix": True, "table": False, "vector": True}


def test_dense_specs_stages():
    """Eight data-parallel devices: the layer dim is never split, 24 > 16 and 40 > 8 are, five elements stay whole."""
    roles = roles_of(data=2)
    whole = {"matrix": P(None, None, None), "table": P(None, None), "vector": P(None, None)}
    split = {"matrix": P(None, None, roles.dense), "table": P(roles.dense, None), "vector": P(None, None)}
    nothing, gathered = {"matrix": -1, "table": -1, "vector": -1}, {"matrix": 1, "table": 0, "vector": -1}
    assert dense_specs(SHAPES, MODEL_DIMS, STACKED, roles, 0) == (whole, whole, nothing)
    assert dense_specs(SHAPES, MODEL_DIMS, STACKED, roles, 1) == (whole, split, nothing)
    assert dense_specs(SHAPES, MODEL_DIMS, STACKED, roles, 3) == (split, split, gathered)


def test_dense_specs_with_model_parallelism():
    """Two MP devices take the last dim of `matrix`, so that the four data-parallel ones take the other."""
    roles = roles_of(model=2)
    assert roles.model == ("expert_mp",) and roles.size(roles.dense) == 4
    params, state, gather = dense_specs(SHAPES, MODEL_DIMS, STACKED, roles, 3)
    matrix = P(None, roles.dense, "expert_mp")
    assert params == state == {"matrix": matrix, "table": P(roles.dense, None), "vector": P(None, None)}
    assert gather == {"matrix": 0, "table": 0, "vector": -1}
    params, state, gather = dense_specs(SHAPES, MODEL_DIMS, STACKED, roles, 1)
    assert params["matrix"] == P(None, None, "expert_mp") and state["matrix"] == matrix


BANK = {"w_in": (16, 8, 12), "w_out": (16, 12, 8)}  # [D Rb, M, F] and [D Rb, F, M] with F = 12


def bank(hidden):
    """Return the specs of a bank whose hidden dim lies over `hidden`."""
    return {"w_in": P("expert", None, hidden), "w_out": P("expert", hidden, None)}


def test_expert_specs_stages():
    """Two data-parallel groups of four expert-parallel devices: from stage 1 on the optimizer state is split over
    `data`."""
    roles = roles_of(data=2)
    flat, split = bank(None), bank("data")
    assert expert_specs(BANK, roles, 0, None) == (flat, flat, flat)
    assert expert_specs(BANK, roles, 1, None) == (flat, flat, split)
    assert expert_specs(BANK, roles, 3, None) == (flat, flat, split)


def test_expert_specs_of_dp():
    """Under `dp` the experts' own stage counts: 1 splits the state, 2 the gradients too, 3 the parameters too."""
    roles = roles_of(data=4, expert_shard=2)  # F = 12 = 2 * 6: not over eight devices
    shards = bank("expert_shard")
    assert expert_specs(BANK, roles, 3, 3) == (shards, shards, shards)
    roles = roles_of(data=2, expert=4)
    flat, split = bank(None), bank("data")
    assert expert_specs(BANK, roles, 3, 0) == (flat, flat, flat)
    assert expert_specs(BANK, roles, 0, 1) == (flat, flat, split)
    assert expert_specs(BANK, roles, 0, 2) == (flat, split, split)
    assert expert_specs(BANK, roles, 0, 3) == (split, split, split)


def test_expert_specs_with_expert_shards():
    """F is split over the expert shards first, and each shard's part over `data`."""
    roles = roles_of(data=2, expert_shard=2)
    _, _, state = expert_specs(BANK, roles, 1, None)
    assert state == bank(("expert_shard", "data"))

"""In which order transfers may start: those of `pairwise` and the phases of s2's SAA, read from the traced program."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from support.layer_cases import roles_of

from moe_jax.moe.schedules.pairwise import Pipeline
from moe_jax.moe.schedules.s2 import collect_parts
from moe_jax.parallel.exchange import ExpertGroup
from moe_jax.parallel.static_sizes import bucket_layout


def waits(mapped, arguments, kind):
    """Return, for each permute in the program's order, how many operations of a kind its operands are computed from."""
    (outer,) = jax.make_jaxpr(mapped)(*arguments).eqns
    sources, permutes = {}, []
    for equation in outer.params["jaxpr"].eqns:
        before = frozenset().union(*(sources.get(id(atom), frozenset()) for atom in equation.invars))
        if equation.primitive.name == "ppermute":
            permutes.append(len(before))
        if equation.primitive.name == kind:
            before |= {id(equation)}
        sources |= {id(out): before for out in equation.outvars}
    return permutes


@pytest.mark.parametrize("groups, expected", [(8, [0, 1, 2, 3, 4, 5, 6]), (4, [0, 1, 2]), (2, [0])])
def test_transfers_wait_for_the_experts_of_the_step_before_the_last(groups, expected):
    """S_1 waits for none, S_s for C_0 .. C_{s-2}; no way back is on its way before its own experts are done."""
    roles = roles_of(1, 1)
    pipeline = Pipeline(ExpertGroup(roles), groups)
    blocks = jnp.zeros((8, pipeline.each, groups, 2, 4))
    arriving = jnp.ones((8, 8, 1), jnp.int32)

    def run(blocks, arriving):
        return pipeline.run(blocks[0], arriving[0], lambda rows, sizes: jnp.tanh(rows))[0][None]

    mapped = jax.shard_map(run, mesh=roles.mesh, in_specs=P(roles.all), out_specs=P(roles.all))
    found = waits(mapped, (blocks, arriving), "tanh")
    assert len(found) == 2 * (groups - 1)  # one a step and way, none for the own group
    assert found[: groups - 1] == expected
    assert all(back >= s for s, back in enumerate(found[groups - 1 :], 1))


def test_phases_of_saa_wait_for_the_gather_before_the_last():
    """Phase j + 1 starts next to gather j, when gather j - 1 is through; 4 members of 2 shards, 2 permutes a phase."""
    roles = roles_of(2, 2)
    collect = functools.partial(collect_parts, roles, ExpertGroup(roles), "saa", bucket_layout(1, 4))
    mapped = jax.shard_map(collect, mesh=roles.mesh, in_specs=P(roles.all), out_specs=P(roles.dense))
    assert waits(mapped, (jnp.zeros((8 * 8, 4)),), "all_gather_invariant")[1:] == [0, 0, 1, 1, 2, 2]

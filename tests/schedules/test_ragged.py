"""The ragged transport, lowered for CUDA on a machine without a GPU: it is there forward and backward.

XLA:CPU has no ragged all-to-all, so nothing runs here; a run on GPUs compares gradients before its first step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.layer_cases import EXPERTS, TOKENS, draw, moe_config

from moe_jax.dispatch import even_tables, local
from moe_jax.mesh import MeshConfig
from moe_jax.mesh.abstract import build_abstract_roles
from moe_jax.mesh.sharding import expert_specs
from moe_jax.moe.bank import open_grad_sink
from moe_jax.moe.layer import make_moe


@pytest.mark.parametrize(
    "schedule, shards, model, exchanges", [("s1", 1, 1, 4), ("deepspeed", 2, 2, 4), ("s2", 2, 4, 4)]
)
def test_ragged_lowers_for_cuda(schedule, shards, model, exchanges):
    """Two exchanges forward and two backward, s2 by AAS: the phases of SAA are rounds of their own."""
    roles = build_abstract_roles(MeshConfig(expert_shard=shards, model=model), 8)
    config = moe_config(schedule, transport="ragged", grouped_matmul="reference", bucket_slack=100.0)
    apply = make_moe(config, roles, TOKENS // roles.size(roles.dense), "gelu")
    tables = even_tables(1, EXPERTS, roles.size(roles.expert))

    def body(x, w_gate, bank, grad_sink, tables):
        tables = local(tables)
        grad_sink = {name: open_grad_sink(value, tables.home_row)[0] for name, value in grad_sink.items()}
        layer = jax.tree.map(lambda array: array[0], tables)
        return apply(x, jnp.arange(x.shape[0], dtype=jnp.int32), w_gate, bank, grad_sink, layer)[0]

    bank = expert_specs({"w_in": (1, 1, 1), "w_out": (1, 1, 1)}, roles, 0, None)[0]
    rows = P(roles.dense)
    sharded = jax.shard_map(body, mesh=roles.mesh, in_specs=(rows, P(), bank, bank, P(roles.expert)), out_specs=rows)

    def step(x, w_gate, bank, grad_sink, cotangent):
        y, pull = jax.vjp(lambda *a: sharded(*a, tables), x, w_gate, bank, grad_sink)
        return y, pull(cotangent)

    x, w_gate, experts, cotangent = draw(False, np.float32)
    traced = jax.jit(step).trace(x, w_gate, experts, experts, cotangent)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("ragged_all_to_all") >= exchanges

"""One MoE layer under a schedule, forward and backward, ready to be timed.

Inputs: sizes and a mesh. Outputs: a compiled call on arrays that are there. Gradients stay where they arise: the sum of
the gate's gradient over devices is left out, as Parm leaves it out of its times; with one data-parallel group the
experts' gradients need no sum. Letters: docs/notation.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from moe_jax.calibration.timing import placed, spread
from moe_jax.collectives.replicated import varying_to_replicated
from moe_jax.dispatch import even_tables, local
from moe_jax.mesh.roles import Roles
from moe_jax.mesh.sharding import expert_specs
from moe_jax.moe.bank import open_grad_sink, with_grad_sink
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.layer import make_moe
from moe_jax.schedules import schedule_record


def layer_call(config: MoEConfig, roles: Roles, tokens: int, model_dim: int, hidden_dim: int) -> Callable:
    """Compile the layer and return a call of it.

    Args:
      config: the layer, its schedule by name; roles: a mesh with one data-parallel group.
      tokens: N; model_dim: M; hidden_dim: F.
    """
    assert roles.size(roles.data) == 1, "with several data-parallel groups the experts' gradients would be summed"
    apply = make_moe(config, roles, tokens, "gelu")
    tables = jax.tree.map(np.asarray, even_tables(1, config.num_experts, roles.size(roles.expert)))
    whole = schedule_record(config.schedule).gates_group

    def body(x, w_gate, bank, grad_sink, tables):
        tables = local(tables)
        grad_sink = {name: open_grad_sink(value, tables.home_row)[0] for name, value in grad_sink.items()}
        layer = jax.tree.map(lambda array: array[0], tables)
        # one copy of the gate's weight per device, so that its gradient stays there
        weight = varying_to_replicated(w_gate[0], roles.model) if whole else w_gate[0]
        ids = jnp.arange(x.shape[0], dtype=jnp.int32)
        return apply(x, ids, weight, bank, grad_sink, layer)[0]

    specs = expert_specs({"w_in": (1, 1, 1), "w_out": (1, 1, 1)}, roles, 0, None)[0]
    rows = P(roles.dense)
    in_specs = (rows, P(roles.all), specs, specs, P(roles.expert))
    sharded = jax.shard_map(body, mesh=roles.mesh, in_specs=in_specs, out_specs=rows)

    def step(x, w_gate, experts, cotangent, tables):
        def forward(x, w_gate, experts):
            return sharded(x, w_gate, *with_grad_sink(experts), tables)

        y, pull = jax.vjp(forward, x, w_gate, experts)
        return y, pull(cotangent)

    experts, total = config.num_experts, tokens * roles.size(roles.dense)
    normal = functools.partial(spread, scale=model_dim**-0.5)
    bank = {
        "w_in": normal((experts, model_dim, hidden_dim), roles.sharding(*specs["w_in"]), 1),
        "w_out": normal((experts, hidden_dim, model_dim), roles.sharding(*specs["w_out"]), 2),
    }
    weight = np.random.default_rng(3).standard_normal((1, model_dim, experts), np.float32) * model_dim**-0.5
    weights = placed(np.broadcast_to(weight, (roles.num_devices, model_dim, experts)), roles.sharding(roles.all))
    x, cotangent = (spread((total, model_dim), roles.sharding(roles.dense), seed) for seed in (4, 5))
    tables = jax.tree.map(lambda array: placed(array, roles.sharding(roles.expert)), tables)
    arrays = (x, weights, bank, cotangent, tables)
    compiled = jax.jit(step).lower(*arrays).compile()
    return lambda: compiled(*arrays)

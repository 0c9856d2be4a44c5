"""`MoELayer`: the layer as a Flax module for a user's own model.

Inputs: global tokens [..., M]. Outputs: tokens of the same shape, the weighted gate losses, and the loads. It contains
the `shard_map`; inside is `make_moe`. Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from moe_jax.errors import UserError
from moe_jax.moe.bank import init_bank, init_expert, open_grad_sink, with_grad_sink
from moe_jax.moe.build import check_float8, check_hidden_dim, layer_sizes, make_moe
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.experts import ACTIVATIONS, weight_names
from moe_jax.moe.routers import RouterInputs, build_router
from moe_jax.moe.routing import even_tables, local
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.sharding import expert_specs


class MoELayer(nnx.Module):
    """A mixture of experts as a drop-in for a feed-forward layer, on one device or on a mesh.

    Calling it with tokens [..., M] returns (tokens [..., M], loss, loads): the same shape, the weighted auxiliary and
    z-loss to add to your loss (float []), and how many tokens each source device sent to each expert (int32 [D, E]).
    The leading dims together must divide over all devices of the mesh.

    Attributes:
      w_gate: [M, E] parameter.
      router_leaves: {name: [...]} parameters that the router keeps besides it; empty for most.
      bank: {name: [E, ...]} parameters, experts in order, sharded over the mesh's expert axis; where its D devices
        cannot share them evenly [D ceil(E / D), ...], with a row of zeros last on those with fewer.
      shared: {name: [M, Fs] or [Fs, M]}, of the shared experts together, and w_mix [M, 2] where their mix is learned;
        empty without any.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        model_dim: int,
        hidden_dim: int,
        roles: Roles,
        rngs: nnx.Rngs,
        activation: str = "gelu",
        dtype=jnp.float32,
    ):
        """Initialise the layer.

        Args:
          roles: the mesh, from `moe_jax.parallel.mesh.build_mesh`; rngs: Flax random streams; `params` is used.
          activation: 'gelu' or 'swiglu'; dtype: of the parameters.

        Raises:
          UserError: if hidden_dim does not divide over the shards of an expert.
        """
        devices = roles.size(roles.expert)
        layer_sizes(config, roles, 1)
        check_hidden_dim("hidden_dim", hidden_dim, roles)
        check_float8(config, model_dim)
        sizes = {"model_dim": model_dim, "hidden_dim": hidden_dim, "activation": activation, "dtype": dtype}
        bank = init_bank(functools.partial(init_expert, **sizes), rngs.params(), 1, config.num_experts, devices)
        self.config, self.roles, self.activation = config, roles, activation
        scale = model_dim**-0.5
        self.w_gate = nnx.Param(scale * jax.random.normal(rngs.params(), (model_dim, config.num_experts), dtype))
        router = build_router(config)
        leaves = router.leaves(model_dim)
        if router.state:
            line = "MoEConfig.router %r: nothing moves %s between the steps of a MoELayer; take another router there"
            logging.getLogger(__name__).warning(line, config.router, ", ".join(router.state))
        self.router_leaves = nnx.Dict({name: nnx.Param(jnp.zeros(shape, dtype)) for name, shape in leaves.items()})
        shared = config.shared_ffn_dim(hidden_dim)
        values = init_expert(rngs.params(), model_dim, shared, activation, dtype) if shared else {}
        if config.residual == "learned":
            values["w_mix"] = scale * jax.random.normal(rngs.params(), (model_dim, 2), dtype)
        self.shared = nnx.Dict({name: nnx.Param(value) for name, value in values.items()})
        specs = expert_specs({name: value.shape for name, value in bank.items()}, roles, 0, None)[0]
        placed = {name: jax.device_put(value, roles.sharding(*specs[name])) for name, value in bank.items()}
        self.bank = nnx.Dict({name: nnx.Param(value) for name, value in placed.items()})

    def __call__(self, x, *, noise_key=None):
        """Apply the layer to tokens [..., M]; see the class for what comes back.

        Raises:
          UserError: tokens of another width than M, or a number of them that does not divide over the devices.
        """
        width = self.w_gate.shape[0]
        if x.ndim == 0 or x.shape[-1] != width:
            raise UserError(
                f"the MoE layer takes tokens [..., {width}] (its model_dim) and got an array of shape {x.shape}; pass "
                f"such tokens, or build the layer with model_dim = {x.shape[-1] if x.ndim else width}"
            )
        tokens = x.reshape(-1, width)
        roles, config = self.roles, self.config
        shards = roles.size(roles.dense)
        if not tokens.shape[0] or tokens.shape[0] % shards:
            raise UserError(
                f"the MoE layer got {tokens.shape[0]} tokens, which do not divide over {shards} devices; pad the batch "
                f"to a multiple of {shards}"
            )
        bank, grad_sink = with_grad_sink({name: self.bank[name][...] for name in self.bank})
        token_ids = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        apply = _make_global_moe(config, roles, tokens.shape[0], self.activation)
        gate = {"w_gate": self.w_gate[...], **{name: self.router_leaves[name][...] for name in self.router_leaves}}
        y, loss, loads = apply(tokens, token_ids, gate, bank, grad_sink, noise_key)
        if self.config.shared_experts:
            weights = {name: self.shared[name][...].astype(x.dtype) for name in self.shared}
            pre = (tokens @ weights[name] for name in weight_names(self.activation)[:-1])
            out = ACTIVATIONS[self.activation](*pre) @ weights["w_out"]
            if "w_mix" in weights:
                acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
                w_mix = self.shared["w_mix"][...].astype(acc_dtype)
                mix = jax.nn.softmax(tokens.astype(acc_dtype) @ w_mix, axis=-1)
                out, y = mix[:, :1].astype(x.dtype) * out, mix[:, 1:].astype(x.dtype) * y
            y = y + out
        return y.reshape(x.shape), loss, loads


@functools.lru_cache(maxsize=32)
def _make_global_moe(config: MoEConfig, roles: Roles, tokens: int, activation: str):
    """Return `make_moe` on global arrays [N, M], with losses; jitted, because eagerly each operation compiles alone."""
    tables = even_tables(1, config.num_experts, roles.size(roles.expert))
    inside = tuple(axis for axis in roles.all if axis not in roles.expert)

    def body(x, token_ids, gate, bank, grad_sink, noise_key, tables):
        tables = local(tables)  # of one layer
        grad_sink, _ = open_grad_sink(grad_sink, tables.home_row[0])
        layer = jax.tree.map(lambda array: array[0], tables)
        apply = make_moe(config, roles, x, activation)
        y, stats, _ = apply(x, gate, RouterInputs(noise_key, token_ids, layer), bank, grad_sink)
        sums = lax.psum(stats.sums, roles.dense)
        per_source = lax.psum(stats.counts, inside) if inside else stats.counts
        sums = dataclasses.replace(sums, counts=lax.psum(stats.counts, roles.all))
        balance = build_router(config).balance_loss(sums, tokens)
        loss = config.aux_loss_weight * balance + config.z_loss_weight * sums.squared_logsumexp / tokens
        return y, loss, per_source[None]

    rows, by_expert = P(roles.dense), P(roles.expert)
    shapes = {name: (1, 1, 1) for name in weight_names(activation)}
    bank = expert_specs(shapes, roles, 0, None)[0]
    sharded = jax.shard_map(
        body,
        mesh=roles.mesh,
        in_specs=(rows, rows, P(), bank, bank, P(), by_expert),
        out_specs=(rows, P(), by_expert),
    )
    return jax.jit(lambda *arguments: sharded(*arguments, tables))

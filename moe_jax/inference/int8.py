"""Experts' weights as int8 with a scale for each output channel, for inference alone.

Inputs: a bank {name: float [Rb, K, N]}. Outputs: {name: int8 [Rb, K, N], name + '_scale': float32 [Rb, N]}, a quarter
of float32's bytes and four for each channel; and the experts' FFN on it. A weight is scale x int8, scale the largest
magnitude of its channel over 127, so each is off by at most half a scale. Activations stay as they are: a block of
weights is cast as its matmul reads it, and the product is scaled, so no float copy of a bank is ever made.
Letters: docs/notation.md; K and N the contracted and the resulting dim of a matmul.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax.grouped_matmul.matmul import grouped_matmul
from moe_jax.moe.experts import apply_activation, weight_names
from moe_jax.moe.layer import ExpertWeights, MoE

SCALE = "_scale"
IMPLEMENTATION = "blocked"  # casts a block of weights as it reads it


def quantized_specs(specs: dict) -> dict:
    """Return the PartitionSpecs of a bank in int8 from those of the bank [Rb, K, N]."""
    scales = {name + SCALE: PartitionSpec(*(tuple(spec) + (None,) * 3)[:3:2]) for name, spec in specs.items()}
    return {**specs, **scales}


def quantize_bank(bank: dict) -> dict:
    """Return a bank in int8 on the same devices; the arrays given are deleted one by one."""

    def one(leaf):
        sharding = leaf.sharding
        scale = NamedSharding(sharding.mesh, quantized_specs({"w": sharding.spec})["w" + SCALE])
        pair = jax.block_until_ready(jax.jit(quantize, out_shardings=(sharding, scale))(leaf))
        leaf.delete()  # not two banks at once
        return pair

    found = {}
    for name, leaf in bank.items():
        found[name], found[name + SCALE] = one(leaf)
    return found


def quantize(weight):
    """Return (int8 [Rb, K, N], scale float32 [Rb, N]) of weights [Rb, K, N]; a channel of zeros has scale 1."""
    weight = weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(weight), axis=1)
    scale = jnp.where(largest > 0, largest / 127, 1)
    return jnp.round(weight / scale[:, None]).astype(jnp.int8), scale


@dataclasses.dataclass(frozen=True)
class Int8MoE(MoE):
    """The layer on a bank of `quantize_bank`; everything but its experts is as ever."""

    def experts(self, rows, group_sizes, weights: ExpertWeights):
        """Apply the experts to rows [R, M] in group order."""
        with jax.named_scope("experts"):
            edges = jnp.cumsum(group_sizes)
            group = jnp.searchsorted(edges, jnp.arange(rows.shape[0], dtype=edges.dtype), side="right")
            group = jnp.minimum(group, group_sizes.shape[0] - 1)  # rows of no group are zero
            acc_dtype = jnp.promote_types(rows.dtype, jnp.float32)

            def times(lhs, name):
                out = grouped_matmul(lhs, group_sizes, weights.operands(name), implementation=IMPLEMENTATION)
                scale = weights.bank[name + SCALE][weights.home_row][group]
                return out.astype(acc_dtype) * scale.astype(acc_dtype)

            *ins, last = weight_names(self.activation)
            hidden = apply_activation(self.activation, *(times(rows, name) for name in ins)).astype(rows.dtype)
            return times(hidden, last).astype(rows.dtype)


def with_int8(moe: MoE) -> Int8MoE:
    """Return the layer for a bank of `quantize_bank`."""
    return Int8MoE(**{field.name: getattr(moe, field.name) for field in dataclasses.fields(moe)})

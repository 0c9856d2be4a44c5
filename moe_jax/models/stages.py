"""One layer as four functions, and what each of them keeps for its backward.

Enters: this device's activations, one layer's parameters and tables, its share of the bank, its guests. Leaves: the
results of each stage, and `Kept`. Which stage runs when, and what is in flight beside it, is not decided here.
Letters: b sequences here, Sq positions, t = b Sq tokens, M model dim, R rows, Hs home and Gs guest slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax.collectives.varying import cast_varying
from moe_jax.models.kept import Kept, keep
from moe_jax.moe.staged import StagedMoE


@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """Everything that a layer computes with but activations; the backward has the same arrays again.

    Attributes:
      mix: parameters of the unit but for its gate's, gathered; gate: the gate's.
      bank: {name: [S, ...]} in the compute dtype; guests: {name: [Gs, ...]}, or None.
      sinks: (home {name: [Hs, ...]}, guests {name: [Gs, ...]} or None), doors for gradients.
      tables: the layer's; token_ids: int32 [t]; noise_key: PRNG key, or None.
    """

    mix: Any
    gate: Any
    bank: dict
    guests: dict | None
    sinks: tuple[dict, dict | None]
    tables: Any
    token_ids: jax.Array
    noise_key: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Stages:
    """The functions of one layer. Each `run_*` returns its result and, with `keeping`, a `Kept`, else None.

    Attributes:
      attend: (mix, gate, x [b, Sq, M]) -> [b, Sq, M], everything before the MoE layer.
      norm: (mix, gate, x) -> [t, M], the gate's norm.
      moe: the layer in stages.
      checkpoint, moe_checkpoint: wrap attention, and the other stages, in an activation checkpointing policy.
    """

    attend: Callable
    norm: Callable
    moe: StagedMoE
    checkpoint: Callable
    moe_checkpoint: Callable

    def attention(self, x, inputs: LayerInputs, keeping: bool):
        """Run everything before the gate: [b, Sq, M] -> [b, Sq, M]."""

        def run(x, mix):
            return self.attend(mix, inputs.gate, x)

        return self._run(self.checkpoint(run), (x, inputs.mix), inputs, keeping)

    def dispatch(self, a, inputs: LayerInputs, keeping: bool):
        """Gate and send: returns ((rows, context's floats, stats' floats), the integers beside them)."""

        def run(a, gate):
            tokens = self.norm(inputs.mix, gate, a)
            sent, stats, passes = self.moe.send(
                tokens, inputs.token_ids, gate["w_gate"], inputs.tables, inputs.noise_key
            )
            (context, stats), whole = split_floats((sent.context, stats))
            return (sent.rows, context, stats), (sent.group_sizes, whole, passes)

        return self._run(self.moe_checkpoint(run), (a, inputs.gate), inputs, keeping, has_aux=True)

    def experts(self, rows, group_sizes, inputs: LayerInputs, keeping: bool):
        """Compute rows [R, M]."""

        def run(rows, sinks):
            return self.moe.experts(rows, group_sizes, self._weights(inputs, sinks))

        return self._run(self.moe_checkpoint(run), (rows, inputs.sinks), inputs, keeping)

    def combine(self, done, context, whole, inputs: LayerInputs, keeping: bool):
        """Bring rows home and run the later passes: [t, M]."""

        def run(done, context, sinks):
            return self.moe.finish(done, join_floats(context, whole), self._weights(inputs, sinks))

        return self._run(self.moe_checkpoint(run), (done, context, inputs.sinks), inputs, keeping)

    def _weights(self, inputs: LayerInputs, sinks) -> dict:
        return {
            "bank": inputs.bank,
            "guests": inputs.guests,
            "tables": inputs.tables,
            "sink": sinks[0],
            "guest_sink": sinks[1],
        }

    def _run(self, run, arguments, inputs, keeping, has_aux=False) -> tuple[Any, Kept | None]:
        if not keeping:
            return run(*arguments), None
        out, pull_back, *aux = jax.vjp(run, *arguments, has_aux=has_aux)
        return ((out, *aux) if has_aux else out), keep(pull_back, known_arrays(inputs))


def known_arrays(inputs: LayerInputs):
    """Return the arrays that a `Kept` of this layer does not hold."""
    return [getattr(inputs, field.name) for field in dataclasses.fields(inputs)]


def doors(like: dict, slots: int, dtype, axes) -> dict:
    """Return {name: [slots, ...]}, zeros that nothing reads, varying over `axes`."""
    return {n: cast_varying(jnp.zeros((slots, *v.shape[1:]), dtype), axes) for n, v in like.items()}


def split_floats(tree):
    """Return (tree of the floats, rest): `join_floats` undoes it. Leaves of the other kind are None."""
    floats = jax.tree.map(lambda leaf: leaf if _is_float(leaf) else None, tree)
    rest = jax.tree.map(lambda leaf: None if _is_float(leaf) else leaf, tree)
    return floats, rest


def join_floats(floats, rest):
    """Put the two trees of `split_floats` together."""
    return jax.tree.map(lambda a, b: b if a is None else a, floats, rest, is_leaf=lambda node: node is None)


def _is_float(leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)

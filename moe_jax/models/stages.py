"""One layer as six functions, and the `Residuals` that each saves for its backward; `prefetch.py` runs a stack of them.

Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.models.residuals import Residuals, residuals_of
from moe_jax.models.transformer import add_shared
from moe_jax.moe.bank import ExpertWeights
from moe_jax.moe.layer import MoE
from moe_jax.moe.permute import permute_rows, unpermute_rows, unpermute_tokens
from moe_jax.moe.routers import RouterInputs
from moe_jax.moe.routing import record
from moe_jax.parallel.sparse_all_gather import Transfer
from moe_jax.parallel.transfer_shape import TransferShape
from moe_jax.planning.block_schedule import BlockSchedule


@record
class Constants:
    """What all layers of a stack read and never differentiate.

    Attributes:
      bank: {name: [Rb, ...]} in the compute dtype; tables: leaves [L, ...]; of the whole model {segment: that}.
      token_ids: int32 [t].
      key: of the gates' noise; None where they have none.
      documents: int32 [b, Sq], or None.
      choices: int32 [L, t, K], recorded expert ids to replay, or None.
    """

    bank: dict
    tables: Any
    token_ids: jax.Array
    key: jax.Array | None
    documents: jax.Array | None = None
    choices: jax.Array | None = None


@record
class LayerInputs:
    """All inputs of a layer but activations; the backward has the same arrays again.

    Attributes:
      mix: parameters of what precedes the MoE layer, gathered; gate: of its gate and its shared experts.
      bank: {name: [Rb, ...]} in the compute dtype.
      replicas: a tuple with {name: [m, ...]} for each transfer, ahead of the gate and after it.
      grad_sinks: (home {name: [Hs, ...]}, a tuple of grad_sinks beside `replicas`).
      tables: the layer's; token_ids: int32 [t]; noise_key: PRNG key, or None; documents: int32 [b, Sq], or None.
    """

    mix: Any
    gate: Any
    bank: dict
    replicas: tuple[dict, ...]
    grad_sinks: tuple[dict, tuple[dict, ...]]
    tables: Any
    token_ids: jax.Array
    noise_key: jax.Array | None
    documents: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Stages:
    """A stack of layers, and each one's stages: they return a result, with `save_residuals` `Residuals`, else None.

    The exchanges stand alone (`send`, `send_back`), with all computation in the stages around them. Where the schedule
    has halves, the stages are those of half as many tokens.

    Attributes:
      attend: (mix, gate, x [b, Sq, M], documents) -> [b, Sq, M], everything before the MoE layer.
      enter_moe: (mix, gate, x) -> ([t, M], what shared experts add), what `Unit.enter_moe` returns.
      moe: the layer, whose schedule is an `ExpertParallel` that runs its experts in one piece.
      checkpoint: wraps a stage in an activation checkpointing policy.
      recompute: save the inputs of the two halves of a layer only; the schedule runs the stages of the second again, so
        no checkpoint does.
      schedule: the windows.
      transfer: how parameters move; with None the windows have no moves.
      late: of replicas that come after the gate, inside the stage `route`; None for none.
      prepare: (mix, gate) of one layer -> the same, gathered; differentiated by the stack.
      scan: loop over turns, else write all layers out.
      first_layer: MoE layers before this stack, by which the gates' noise is keyed.
    """

    attend: Callable
    enter_moe: Callable
    moe: MoE
    checkpoint: Callable
    recompute: bool
    schedule: BlockSchedule
    transfer: Transfer | None
    late: TransferShape | None
    prepare: Callable
    scan: bool
    first_layer: int

    def attention(self, x, inputs: LayerInputs, save_residuals: bool):
        """Run everything before the gate: [b, Sq, M] -> [b, Sq, M]."""

        def run(x, mix):
            return self.attend(mix, inputs.gate, x, inputs.documents)

        return self._run(self.checkpoint(run), (x, inputs.mix), inputs, save_residuals)

    def route(self, a, inputs: LayerInputs, save_residuals: bool):
        """Gate and pack: returns ((rows, context's floats, stats' floats, late grad_sinks), what has no gradient).

        The latter are (sent, the rest of context and stats, passes, late replicas): replicas that come after the
        gate, a tuple of {name: [m, ...]}, and the grad_sinks through which their gradients enter.
        """

        def run(a, gate, home_sink):
            tokens, beside = self.enter_moe(inputs.mix, gate, a)
            router_params = {name: leaf for name, leaf in gate["gate"].items() if name != "norm"}
            schedule = self.moe.schedule
            routed, stats, _, late = self.moe.route(
                tokens,
                router_params,
                RouterInputs(inputs.noise_key, inputs.token_ids, inputs.tables),
                inputs.bank,
                home_sink,
            )
            rows, sent = schedule.pack(routed, 0)
            before, passes = None, routed.passes
            if schedule.run_passes > 1:  # later passes wait for them
                before = lax.stop_gradient(stats)
            else:  # the combine needs the weights alone
                routed = dataclasses.replace(routed, tokens=None, routing=None)
            context = routed, before, beside
            leaves, tree = jax.tree.flatten((context, stats))
            floats = [leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else None for leaf in leaves]
            rest = [leaf if own is None else None for leaf, own in zip(leaves, floats, strict=True)]
            (context, stats), whole = (jax.tree.unflatten(tree, part) for part in (floats, rest))
            values, late_grad_sinks = (tuple(part) for part in zip(*late, strict=True)) if late else ((), ())
            return (rows, context, stats, late_grad_sinks), (sent, whole, passes, values)

        arguments = (a, inputs.gate, inputs.grad_sinks[0] if self.moe.late else {})
        return self._run(
            run if self.recompute else self.checkpoint(run), arguments, inputs, save_residuals, has_aux=True
        )

    def send(self, rows, sent, inputs: LayerInputs, save_residuals: bool):
        """Exchange the packed rows."""
        schedule = self.moe.schedule
        return self._run(lambda rows: schedule.send(rows, sent), (rows,), inputs, save_residuals)

    def experts(self, received, sent, inputs: LayerInputs, save_residuals: bool):
        """Compute received rows, which leave in the order in which they came."""

        def run(received, grad_sinks):
            rows = permute_rows(received, sent.grouping)
            done = self.moe.experts(rows, sent.grouping.group_sizes, self._weights(inputs, grad_sinks))
            return unpermute_rows(done, sent.grouping)

        return self._run(
            run if self.recompute else self.checkpoint(run), (received, inputs.grad_sinks), inputs, save_residuals
        )

    def send_back(self, rows, sent, inputs: LayerInputs, save_residuals: bool):
        """Exchange the computed rows the other way."""
        schedule = self.moe.schedule
        return self._run(lambda rows: schedule.send_back(rows, sent), (rows,), inputs, save_residuals)

    def unpack(self, returned, sent, context, whole, inputs: LayerInputs, save_residuals: bool):
        """Bring returned rows to their tokens and run the later passes: [t, M]."""

        def run(returned, context, grad_sinks):
            routed, stats, beside = join_floats(context, whole)
            y = unpermute_tokens(returned, routed.weights, sent.parcel)
            experts = functools.partial(self.moe.experts, weights=self._weights(inputs, grad_sinks))
            y = self.moe.finish(y, routed, stats, experts)
            return add_shared(y, *beside)

        return self._run(
            run if self.recompute else self.checkpoint(run),
            (returned, context, inputs.grad_sinks),
            inputs,
            save_residuals,
        )

    def _weights(self, inputs: LayerInputs, grad_sinks) -> ExpertWeights:
        home, of_replicas = grad_sinks
        replicas = tuple(zip(inputs.replicas, of_replicas, strict=True))
        return ExpertWeights(inputs.bank, home, inputs.tables.home_row, replicas, constant=True)

    def _run(self, run, arguments, inputs, save_residuals, has_aux=False) -> tuple[Any, Residuals | None]:
        if not save_residuals:
            return run(*arguments), None
        out, pull_back, *aux = jax.vjp(run, *arguments, has_aux=has_aux)
        return ((out, *aux) if has_aux else out), residuals_of(pull_back, inputs)


def join_floats(floats, rest):
    """Put two trees together of which one has the floats, the other what is none, and None in each other's places."""
    return jax.tree.map(lambda a, b: b if a is None else a, floats, rest, is_leaf=lambda node: node is None)

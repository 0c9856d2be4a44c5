"""One layer in stages, which `prefetch.py` runs, and saves for the backward of, one by one.

Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moe_jax.models.config import Segment
from moe_jax.models.lora import gather_merged
from moe_jax.models.model_group import ModelGroup
from moe_jax.models.residuals import checkpointed
from moe_jax.models.transformer import add_shared
from moe_jax.moe.bank import ExpertWeights
from moe_jax.moe.layer import MoE
from moe_jax.moe.routers import RouterInputs
from moe_jax.moe.routing import record
from moe_jax.parallel.gather import gather_tree
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.sparse_all_gather import ReplicaTransfer
from moe_jax.parallel.transfer_shape import TransferShape
from moe_jax.planning.block_schedule import BlockSchedule


@record
class StackConstants:
    """What the layers of a stack, or one of them, read and never differentiate.

    Attributes:
      bank: {name: [Rb, ...]} in the compute dtype, or of each layer one {name: [Hs, ...]} of its home slots; tables:
        leaves [L, ...], of one layer [...].
      token_ids: int32 [t], as in `RouterInputs`.
      key: PRNG key of the gates' noise; None where they have none.
      documents: int32 [b, Sq], or None.
      choices: int32 [L, t, K], recorded expert ids to replay, or None.
      frozen: parameters of the units that are not trained, (mix, gate) as in `LayerInputs`, leaves [L, ...], or None.
    """

    bank: dict | tuple[dict, ...]
    tables: Any
    token_ids: jax.Array
    key: jax.Array | None
    documents: jax.Array | None = None
    choices: jax.Array | None = None
    frozen: Any = None


@record
class LayerInputs:
    """All inputs of a layer but activations; the backward has the same arrays again.

    Attributes:
      mix: parameters of what precedes the MoE layer, gathered; gate: of its gate and its shared experts.
      replicas: a tuple with {name: [m, ...]} for each transfer, ahead of the gate and after it.
      grad_sinks: (home {name: [Hs, ...]}, a tuple of grad_sinks next to `replicas`).
      constants: of this layer and, where there are two, this half.
    """

    mix: Any
    gate: Any
    replicas: tuple[dict, ...]
    grad_sinks: tuple[dict, tuple[dict, ...]]
    constants: StackConstants


@dataclasses.dataclass(frozen=True)
class Stages:
    """A stack of layers, and each one's stages.

    A stage returns (function, its arguments but the first, which is what the stage before made). Between `route` and
    `experts` is an exchange alone, `send` of the schedule, between `experts` and `unpack` another, `send_back`. Where
    the schedule has halves, the stages are those of half as many tokens.

    Attributes:
      segment: the layers; roles, group: where they run; graph: a unit's modules without their parameters.
      moe: the layer, whose schedule is an `ExpertParallel` that runs its experts in one piece.
      block_schedule: the windows, and which transfers of parameters run next to them.
      transfer: how parameters move; with None the windows have no moves.
      late: of replicas that come after the gate, inside the stage `route`; None for none.
      dims, wires: as `gather_tree` takes them, (of what precedes the MoE layer, of the layer).
      split_bank, split_gradients: {name: dim} that `data` splits of experts' weights, and of their gradients, or -1.
      adapters: as in `Layout`.
    """

    segment: Segment
    roles: Roles
    group: ModelGroup
    graph: Any
    moe: MoE
    block_schedule: BlockSchedule
    transfer: ReplicaTransfer | None
    late: TransferShape | None
    dims: tuple[dict, dict]
    wires: tuple[dict, dict]
    split_bank: dict[str, int]
    split_gradients: dict[str, int]
    adapters: bool = False

    def whole_experts(self, leaves: dict, dims: dict[str, int]) -> dict:
        """Return experts' weights {name: [n, ...]} of which each device of `data` has the part that `dims` says."""
        split = {name: leaf for name, leaf in leaves.items() if dims[name] >= 0}
        if not split:
            return leaves
        dims = {name: dims[name] for name in split}
        return {**leaves, **gather_tree(split, dims, self.roles.data, self.roles.size(self.roles.data))}

    def whole_bank(self, bank: dict, tables):
        """Return the bank as `StackConstants` has it, with whole experts."""
        dims = self.split_bank
        if max(dims.values()) < 0 or self.segment.config.stack == "scan":
            return self.whole_experts(bank, dims)
        return tuple(self.whole_experts({n: leaf[rows] for n, leaf in bank.items()}, dims) for rows in tables.home_row)

    def gathered(self, mix, gate):
        """Return (mix, gate) of one layer with whole leaves."""
        trees, axes = zip((mix, gate), self.dims, self.wires, strict=True), self.roles.dense
        return tuple(gather_merged(tree, dims, axes, self.roles.size(axes), wires) for tree, dims, wires in trees)

    def _checkpointed(self, run: Callable) -> Callable:
        """Return a stage of the MoE half; where the schedule runs it again in the backward, no checkpoint does."""
        config = self.segment.config
        return run if config.recomputes else checkpointed(run, config, self.roles.model)

    def attention(self, inputs: LayerInputs):
        """Everything before the gate: [b, Sq, M] -> [b, Sq, M]."""

        def run(x, mix):
            unit = nnx.merge(self.graph, {**mix, **inputs.gate})
            return unit.attend(x, self.group, inputs.constants.documents)

        return checkpointed(run, self.segment.config, self.roles.model), (inputs.mix,)

    def route(self, inputs: LayerInputs):
        """Gate and pack: (what has gradients, what has none).

        Those are (rows, context, stats, late_grad_sinks): the floats of `context`, which is what `unpack` needs of the
        gate, and of stats, and the grad_sinks through which gradients of late replicas enter. The others are (sent,
        (context, stats), passes, late): the rest of both, and replicas that come after the gate, a tuple of {name:
        [m, ...]}.
        """

        def run(a, gate, home_sink):
            tokens, shared = nnx.merge(self.graph, {**inputs.mix, **gate}).enter_moe(a, self.group)
            router_params = {name: leaf for name, leaf in gate["gate"].items() if name != "norm"}
            schedule = self.moe.schedule
            of_layer = inputs.constants
            given = RouterInputs(of_layer.key, of_layer.token_ids, of_layer.tables, padded=self.group.padded)
            routed, stats, _, late = self.moe.route(tokens, router_params, given, of_layer.bank, home_sink)
            rows, sent = schedule.pack(routed, 0)
            before, passes = None, routed.passes
            if schedule.run_passes > 1:  # later passes wait for them
                before = lax.stop_gradient(stats)
            else:  # the combine needs the weights alone
                routed = dataclasses.replace(routed, tokens=None, routing=None)
            leaves, tree = jax.tree.flatten(((routed, before, shared), stats))
            floats = [leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else None for leaf in leaves]
            rest = [leaf if own is None else None for leaf, own in zip(leaves, floats, strict=True)]
            (context, stats), whole = (jax.tree.unflatten(tree, part) for part in (floats, rest))
            values, late_grad_sinks = (tuple(part) for part in zip(*late, strict=True)) if late else ((), ())
            return (rows, context, stats, late_grad_sinks), (sent, whole, passes, values)

        return self._checkpointed(run), (inputs.gate, inputs.grad_sinks[0] if self.moe.late else {})

    def experts(self, inputs: LayerInputs, sent):
        """Compute received rows, which leave in the order in which they came."""

        def run(received, grad_sinks):
            experts = functools.partial(self.moe.experts, weights=self._weights(inputs, grad_sinks))
            return self.moe.schedule.compute(received, sent, experts)

        return self._checkpointed(run), (inputs.grad_sinks,)

    def unpack(self, inputs: LayerInputs, sent, context, whole):
        """Bring returned rows to their tokens and run the later passes: [t, M]."""

        def run(returned, context, grad_sinks):
            routed, stats, shared = join_floats(context, whole)
            y = self.moe.schedule.unpack(returned, sent, routed.weights)
            experts = functools.partial(self.moe.experts, weights=self._weights(inputs, grad_sinks))
            y = self.moe.finish(y, routed, stats, experts)
            return add_shared(y, *shared)

        return self._checkpointed(run), (context, inputs.grad_sinks)

    def _weights(self, inputs: LayerInputs, grad_sinks) -> ExpertWeights:
        home, of_replicas = grad_sinks
        replicas = tuple(zip(inputs.replicas, of_replicas, strict=True))
        return ExpertWeights(inputs.constants.bank, home, inputs.constants.tables.home_row, replicas, constant=True)


def join_floats(floats, rest):
    """Put two trees together of which one has the floats, the other what is none, and None in each other's places."""
    return jax.tree.map(lambda a, b: b if a is None else a, floats, rest, is_leaf=lambda node: node is None)

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
from moe_jax.models.model_group import ModelGroup
from moe_jax.models.residuals import checkpointed
from moe_jax.models.transformer import add_shared
from moe_jax.moe.bank import ExpertWeights
from moe_jax.moe.layer import MoE
from moe_jax.moe.routers import RouterInputs
from moe_jax.moe.routing import record
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.sharding import gather_tree
from moe_jax.parallel.static_sizes import TransferShape
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
      params: {'mix', 'gate'}, as `of_moe` parts a unit: of a stack those that are not trained, leaves [L, ...], or
        None; of one layer all of them, whole.
      replicas: of one layer those that a stage uses, {'ahead' of the gate or 'late', after it: {name: [m, ...]}}.
    """

    bank: dict | tuple[dict, ...]
    tables: Any
    token_ids: jax.Array
    key: jax.Array | None
    documents: jax.Array | None = None
    choices: jax.Array | None = None
    params: dict | None = None
    replicas: dict | None = None


@dataclasses.dataclass(frozen=True)
class Stages:
    """A stack of layers, and each one's stages.

    A stage takes `read`, by name what its backward gives a cotangent to: values that stages before it made, and
    parameters and grad_sinks of its layer. It returns (what it made that has a cotangent, what it made that has none),
    both by name. `constants` are those of the layer and, where the schedule has halves, of the half; a stage is then
    of half as many tokens. `packing` is what `route` says of the rows, and the same of all stages after it.

    Attributes:
      segment: the layers; roles, group: where they run; graph: a unit's modules without their parameters.
      moe: the layer, whose schedule is an `ExpertParallel` that runs its experts in one piece.
      block_schedule: the windows, and which transfers of parameters run next to them.
      ahead: in which sizes replicas planned ahead move; with None the windows have no moves.
      late: of replicas that come after the gate, inside the stage `route`; None for none.
      dims, wires: as `gather_tree` takes them, {'mix', 'gate'}.
      split_bank, split_gradients: {name: dim} that `data` splits of experts' weights, and of their gradients, or -1.
      adapters: as in `Layout`.
    """

    segment: Segment
    roles: Roles
    group: ModelGroup
    graph: Any
    moe: MoE
    block_schedule: BlockSchedule
    ahead: TransferShape | None
    late: TransferShape | None
    dims: dict[str, dict]
    wires: dict[str, dict]
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

    def bind(self, stage: str, constants: StackConstants, packing) -> Callable:
        """Return run(read) of a stage, which keeps for its backward what `ModelConfig.remat` says."""
        run = functools.partial(getattr(self, stage), constants=constants, packing=packing)
        config = self.segment.config
        # what the schedule runs again in the backward, no checkpoint does
        whole = stage in ("send", "send_back") or (config.recomputes and stage != "attention")
        return run if whole else checkpointed(run, config, self.roles.model)

    def attention(self, read: dict, constants: StackConstants, packing):
        """Run everything before the gate: x [b, Sq, M] -> a [b, Sq, M]."""
        unit = nnx.merge(self.graph, {**read["mix"], **constants.params["gate"]})
        return {"a": unit.attend(read["x"], self.group, constants.documents)}, {}

    def route(self, read: dict, constants: StackConstants, packing):
        """Run the gate on a, and pack rows into buckets.

        Of what `unpack` needs of the gate, and of the stats, the floats have cotangents: `context` and `stats`. So has
        the grad_sink of late replicas, whose values have none. The others: `packing` is (sent, the rest of what
        `unpack` needs), `counted` (the rest of the stats, passes).
        """
        unit = nnx.merge(self.graph, {**constants.params["mix"], **read["gate"]})
        tokens, shared = unit.enter_moe(read["a"], self.group)
        router_params = {name: leaf for name, leaf in read["gate"]["gate"].items() if name != "norm"}
        given = RouterInputs(constants.key, constants.token_ids, constants.tables, padded=self.group.padded)
        home_sink = read.get("home", {})
        routed, stats, late = self.moe.before_dispatch(tokens, router_params, given, constants.bank, home_sink)
        rows, sent = self.moe.schedule.pack(routed, 0)
        before, passes = None, routed.passes
        if self.moe.schedule.run_passes > 1:  # later passes wait for them
            before = lax.stop_gradient(stats)
        else:  # the combine needs the weights alone
            routed = dataclasses.replace(routed, tokens=None, routing=None)
        leaves, tree = jax.tree.flatten(((routed, before, shared), stats))
        floats = [leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else None for leaf in leaves]
        rest = [leaf if own is None else None for leaf, own in zip(leaves, floats, strict=True)]
        (context, stats), (whole, counts) = (jax.tree.unflatten(tree, part) for part in (floats, rest))
        values, late_sink = late[0] if late else ({}, {})
        made = {"packed": rows, "context": context, "stats": stats, "late": late_sink}
        return made, {"packing": (sent, whole), "counted": (counts, passes), "late": values}

    def send(self, read: dict, constants: StackConstants, packing):
        """Exchange packed rows for those that come for the experts here."""
        return {"received": self.moe.schedule.send(read["packed"], packing[0])}, {}

    def experts(self, read: dict, constants: StackConstants, packing):
        """Compute received rows, which leave in the order in which they came."""
        return {"done": self.moe.schedule.compute(read["received"], packing[0], self._experts(read, constants))}, {}

    def send_back(self, read: dict, constants: StackConstants, packing):
        """Exchange the experts' results for those of own rows."""
        return {"returned": self.moe.schedule.send_back(read["done"], packing[0])}, {}

    def unpack(self, read: dict, constants: StackConstants, packing):
        """Bring returned rows to their tokens, run the later passes, and add a: x of the next layer."""
        sent, whole = packing
        routed, stats, shared = join_floats(read["context"], whole)
        y = self.moe.schedule.unpack(read["returned"], sent, routed.weights)
        y = add_shared(self.moe.finish(y, routed, stats, self._experts(read, constants)), *shared)
        return {"x": read["a"] + y.reshape(read["a"].shape)}, {}

    def _experts(self, read: dict, constants: StackConstants) -> Callable:
        """Return `MoE.experts` with the weights of the layer, whose gradients leave through the grad_sinks read."""
        replicas = tuple((values, read[name]) for name, values in constants.replicas.items())
        home_row = constants.tables.home_row
        weights = ExpertWeights(constants.bank, read["home"], home_row, replicas, constant=True)
        return functools.partial(self.moe.experts, weights=weights)


def join_floats(floats, rest):
    """Put two trees together of which one has the floats, the other what is none, and None in each other's places."""
    return jax.tree.map(lambda a, b: b if a is None else a, floats, rest, is_leaf=lambda node: node is None)

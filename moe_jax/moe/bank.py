"""The expert bank: the weights of all experts of all layers, replicas of other devices' experts, and their gradients.

One array per weight, [D Rb, ...], sharded over the expert axis, Rb = L ceil(E / D) rows per device. Tables say which
expert a row belongs to, so an expert may be stored on any device and nothing is copied per layer. Rows that no expert
has are zeros, last on their device.

A loop over layers that differentiated the whole bank would add a bank-sized gradient in every turn. So the bank enters
the loop without a gradient, and through it goes a *grad_sink*: zeros of the bank's shape whose value is never read, and
whose cotangent is the bank's gradient. On its way back through the layers each adds its own rows to it, in place; it
starts from zeros, or from the sum of the microbatches before (`start_sums`), so no second bank of gradients exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.kernels.grouped import MATMULS, GroupedWeights
from moe_jax.moe.experts import weight_names
from moe_jax.parallel.ordering import in_line
from moe_jax.parallel.sparse_all_gather import open_replicas
from moe_jax.parallel.varying import cast_varying, varying_axes, with_gradient, zeros_varying
from moe_jax.planning.placement import Placement, bank_rows
from moe_jax.planning.plan_shape import PlanShape


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """Where the parameters of a layer's experts come from, and where their gradients go.

    Attributes:
      bank: {name: [Rb, ...]}; grad_sink: {name: [Hs, ...]} of what is trained, {} where nothing is.
      home_row: int32 [Hs], the bank row of each home slot.
      replicas: a tuple of (values {name: [m, ...]}, their grad_sink) for each transfer, in the order of their slots.
      constant: bank and replicas have no gradient but through the grad_sinks.
    """

    bank: dict
    grad_sink: dict
    home_row: jax.Array
    replicas: tuple
    constant: bool = False

    def operands(self, name: str) -> tuple[GroupedWeights, ...]:
        """Return the operands of one weight: home slots in the bank, then the replica slots of each transfer."""
        sources = [(self.bank, self.home_row, self.grad_sink)]
        for values, grad_sink in self.replicas:
            sources.append((values, jnp.arange(values[name].shape[0], dtype=jnp.int32), grad_sink))
        return tuple(
            GroupedWeights(
                bank=values[name],
                slots=slots,
                grad_sink=grad_sink.get(name),
                constant=self.constant,
            )
            for values, slots, grad_sink in sources
        )


def init_expert(key, model_dim: int, hidden_dim: int, activation: str, dtype, output_scale: float = 1.0) -> dict:
    """Return the weights of one expert, {name: [M, F] or [F, M]}; normal, scaled by 1 / sqrt(fan in)."""
    weights = {}
    for index, name in enumerate(weight_names(activation)):
        shape = (hidden_dim, model_dim) if name == "w_out" else (model_dim, hidden_dim)
        scale = shape[0] ** -0.5 * (output_scale if name == "w_out" else 1.0)
        weights[name] = (scale * jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)).astype(dtype)
    return weights


def init_bank(make: Callable, key, layers: int, experts: int, devices: int) -> dict:
    """Return {name: [D Rb, ...]} of an even placement: expert (l, e) is make(fold_in(layer, expert)), {name: [...]}."""
    placement = Placement.even(layers, experts, devices)
    rows = layers * -(-experts // devices)
    at = (placement.home * rows + bank_rows(placement)).ravel()
    ids = np.full((2, devices * rows), experts, np.int32)  # of no expert
    ids[:, at] = np.indices(placement.home.shape).reshape(2, -1)

    def one(layer_id, expert_id):
        made = make(jax.random.fold_in(jax.random.fold_in(key, layer_id), expert_id))
        if experts % devices == 0:
            return made
        return jax.tree.map(lambda leaf: jnp.where(expert_id < experts, leaf, 0), made)

    return jax.vmap(one)(*map(jnp.asarray, ids))


def reads_as_stored(implementation: str, plan: PlanShape | None, split: bool) -> bool:
    """Return whether experts read a bank of another dtype than theirs as it is, not a copy of it in theirs.

    A kernel that gathers each layer's weights casts them on the way, and needs no copy of the whole bank, which is 7 GB
    of Qwen3-30B-A3B on one of 8 devices. Replicas, and experts that are split over data, travel in the compute dtype.

    Args:
      implementation: of the grouped matmul; split: whether parameters of experts are gathered over data.
    """
    travels = plan is not None and (plan.ahead is not None or plan.late is not None)
    return MATMULS.find(implementation).gathers and not travels and not split


@with_gradient(lambda d: d[1])
def with_grad_sink(bank):
    """Return (bank, grad_sink): the grad_sink is zeros shaped like the bank, and its cotangent is the bank's gradient.

    The bank may be any tree.

    Called outside `shard_map`; the two may then be sharded differently."""
    return bank, jax.tree.map(jnp.zeros_like, bank)


@jax.custom_vjp
def with_row_sums(own, sink, rows):
    """Return (own, sink); the backward adds own's gradients to rows of the sink's cotangent, in place.

    Args:
      own: tree of [..., n], of one layer; sink: matching tree of [R, ..., n], whose values are never read.
      rows: int32 [...], the row of each of own's; one that is out of range is left out.
    """
    return own, sink


def add_rows(total, rows, own):
    """Return the tree [R, ..., n] with a matching one [..., n] added to its rows; arguments as in `with_row_sums`."""
    add = lambda leaf, part: leaf.at[rows].add(part, mode="drop", unique_indices=True)  # noqa: E731
    return jax.tree.map(add, total, own)


with_row_sums.defvjp(
    lambda own, sink, rows: ((own, sink), rows), lambda rows, d: (None, add_rows(d[1], rows, d[0]), None)
)


def open_grad_sink(grad_sink, rows):
    """Return (one layer's grad_sink {name: [Hs, ...]}, zeros; the bank's, for the next layer).

    Args:
      grad_sink: {name: [Rb, ...]}, this device's part, inside `shard_map`.
      rows: int32 [Hs], the bank row of each home slot; Rb or more (out of range) where the slot is empty.
    """
    opened = {}
    for name, leaf in grad_sink.items():  # low-rank factors vary over other axes than each other
        own = zeros_varying((*rows.shape, *leaf.shape[1:]), leaf.dtype, leaf)
        opened[name] = with_row_sums(own, leaf, cast_varying(rows, varying_axes(leaf)))
    return {name: own for name, (own, _) in opened.items()}, {name: whole for name, (_, whole) in opened.items()}


@jax.custom_vjp
def start_sums(x, sinks, sums):
    """Return x; the cotangent of `sinks`, which have passed all layers, starts from `sums`, of the same shapes."""
    return x


start_sums.defvjp(lambda x, sinks, sums: (x, sums), lambda sums, d: (d, sums, None))


def fetch_replicas(bank, grad_sink, tables, plan: PlanShape | None, axes: tuple[str, ...], like) -> tuple:
    """Return ((replicas {name: [m, ...]} of one layer, their grad_sink),), or () where the plan has none ahead.

    They depend on the bank and the tables alone: called before attention, the transfer can run next to it. Their
    gradients leave through that grad_sink, in the dtype of the one given, and are summed into its cotangent.

    Args:
      bank, grad_sink, tables: of this layer, as `MoE` takes them.
      axes: mesh axes of the expert-parallel group.
      like: array that varies over all mesh axes over which the tokens do.
    """
    if plan is None or plan.ahead is None:
        return ()
    bank, grad_sink = cast_varying((bank, grad_sink), varying_axes(like))
    return (open_replicas(bank, tables.home_row, grad_sink, tables.transfer, plan.ahead, axes),)


def fetch_in_turn(x, params, gather, fetch, grad_sink, tables, plan: PlanShape | None):
    """Return (x, gathered params, replicas) of a layer, in an order of collectives that XLA:CPU keeps.

    Replicas that come after the gate come in a branch (see `moe_jax.parallel.ordering`). So what is fetched ahead
    waits for x and the parameters, and x, on which all other collectives of the layer depend, waits for it. In the
    backward it waits for the gradients of x, the sums of those of the parameters over devices wait for it, and the
    preceding layer for the sums.

    Args:
      x: input of the layer.
      params: its dense parameters; gather(params) returns them as the layer computes with them.
      fetch: (grad_sink, tables, like=x) -> what `fetch_replicas` returns of this layer's bank.
      grad_sink, tables, plan: as `fetch_replicas` takes them.
    """
    if plan is None or plan.late is None:
        return x, gather(params), fetch(grad_sink, tables, like=x)
    x, params = in_line(x, lambda params, _: gather(params), params)
    if plan.ahead is None:
        return x, params, ()

    def fetch_ahead(grad_sink, offer):
        transfer = dataclasses.replace(tables.transfer, offer=offer)
        return fetch(grad_sink, dataclasses.replace(tables, transfer=transfer), like=x)

    x, replicas = in_line(x, fetch_ahead, grad_sink, tables.transfer.offer)
    return x, params, replicas

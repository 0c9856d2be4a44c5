"""Replicas of one layer, fetched before the layer starts: experts whose homes are on other devices.

Inputs: this device's part of the bank, `grad_sink`, the layer's tables, and the shape that a step is compiled for.
Outputs: a tuple with ({name: [m, ...]}, `grad_sink` of the same shapes), m replica slots; an empty one where the plan
fetches nothing ahead. Inside `shard_map`.
"""

from __future__ import annotations

import dataclasses

from moe_jax.collectives.ordering import gradients_in_turn, wait_for, wait_for_tree
from moe_jax.collectives.sparse_all_gather import Transfer, open_replicas
from moe_jax.collectives.varying import cast_varying, varying_axes
from moe_jax.placement import PlanShape


def fetch_replicas(bank, grad_sink, tables, plan: PlanShape | None, axes: tuple[str, ...], like) -> tuple:
    """Return ((replicas {name: [m, ...]} of one layer, their grad_sink),), or () where the plan has none ahead.

    They depend on the bank and the tables alone: called before attention, the transfer can run beside it. Their
    gradients leave through that grad_sink, in the dtype of the one given, and are summed into its cotangent.

    Args:
      bank, grad_sink, tables: of this layer, as `make_moe`'s function takes them.
      axes: mesh axes of the expert-parallel group.
      like: array that varies over all mesh axes over which the tokens do.
    """
    if plan is None or plan.ahead is None:
        return ()
    bank, grad_sink = cast_varying((bank, grad_sink), varying_axes(like))
    return (open_replicas(bank, tables.home_row, grad_sink, tables.transfer, Transfer(plan.ahead, axes)),)


def fetch_in_turn(x, params, gather, bank, grad_sink, tables, plan: PlanShape | None, axes: tuple[str, ...]):
    """Return (x, gathered params, grad_sink, replicas) of a layer, in an order of collectives that XLA:CPU keeps.

    Replicas that come after the gate come in a branch (see `moe_jax.collectives.ordering`). So what is fetched ahead
    waits for x and the parameters, and x, on which all other collectives of the layer depend, waits for it. In the
    backward it waits for the gradients of x and of the gathered parameters, the sums of those over devices wait for it,
    and the preceding layer for the sums.

    Args:
      x: input of the layer.
      params: its dense parameters; gather(params) returns them as the layer computes with them.
      bank, grad_sink, tables, plan, axes: as `fetch_replicas` takes them.
    """
    if plan is None or plan.late is None:
        return x, gather(params), grad_sink, fetch_replicas(bank, grad_sink, tables, plan, axes, x)
    count = tables.home_row[0]
    x, params = gradients_in_turn(x, params, count)
    params = gather(wait_for_tree(params, count, x))
    (x, params), grad_sink = gradients_in_turn((x, params), grad_sink, count)
    if plan.ahead is None:
        return x, params, grad_sink, ()
    turn = dataclasses.replace(tables.transfer, offer=wait_for(tables.transfer.offer, count, x, params))
    replicas = fetch_replicas(bank, grad_sink, dataclasses.replace(tables, transfer=turn), plan, axes, x)
    replicas, (x, params) = gradients_in_turn(replicas, (wait_for(x, count, replicas), params), count)
    return x, params, grad_sink, replicas

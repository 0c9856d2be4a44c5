"""Replicas of one layer, fetched before the layer starts: experts whose homes are on other devices.

Inputs: this device's part of the bank, `grad_sink`, the layer's tables, and the plan that a step is compiled for.
Outputs: ({name: [Gs, ...]}, `grad_sink` of the same shapes), Gs replica slots; or None where the plan fetches nothing
ahead. Inside `shard_map`.
"""

from __future__ import annotations

import dataclasses

from moe_jax.collectives.ordering import gradients_in_turn, wait_for, wait_for_tree
from moe_jax.collectives.sparse_all_gather import open_replicas
from moe_jax.collectives.varying import cast_varying, varying_axes
from moe_jax.moe.layer import LayerPlan


def fetch_replicas(bank, grad_sink, tables, plan: LayerPlan | None, like):
    """Return (replicas {name: [Gs, ...]} of one layer, their grad_sink), or None where the plan has none.

    They depend on the bank and the tables alone: called before attention, the transfer can run beside it. Their
    gradients leave through that grad_sink, in the dtype of the one given, and are summed into its cotangent.

    Args:
      bank, grad_sink, tables: of this layer, as `make_moe`'s function takes them.
      like: array that varies over all mesh axes over which the tokens do.
    """
    if plan is None or plan.transfer is None:
        return None
    bank, grad_sink = cast_varying((bank, grad_sink), varying_axes(like))
    return open_replicas(bank, tables.home_row, grad_sink, tables.transfer, plan.transfer)


def fetch_in_turn(x, params, gather, bank, grad_sink, tables, plan: LayerPlan | None):
    """Return (x, gathered params, grad_sink, replicas) of a layer, in an order of collectives that XLA:CPU keeps.

    Where the replicas' rounds differ by layer, or replicas come after the gate, collectives stand in branches (see
    `moe_jax.collectives.ordering`). So the branch waits for x and the parameters, and x, on which all other collectives
    of the layer depend, waits for the branch. In the backward the branch waits for the gradients of x and of the
    gathered parameters, the sums of those over devices wait for the branch, and the preceding layer for the sums.

    Args:
      x: input of the layer.
      params: its dense parameters; gather(params) returns them as the layer computes with them.
      bank, grad_sink, tables, plan: as `fetch_replicas` takes them.
    """
    if plan is None or not plan.branches:
        return x, gather(params), grad_sink, fetch_replicas(bank, grad_sink, tables, plan, x)
    count = tables.transfer.layer
    x, params = gradients_in_turn(x, params, count)
    params = gather(wait_for_tree(params, count, x))
    (x, params), grad_sink = gradients_in_turn((x, params), grad_sink, count)
    if plan.transfer is None:
        return x, params, grad_sink, None
    turn = dataclasses.replace(tables.transfer, layer=wait_for(count, count, x, params))
    replicas = fetch_replicas(bank, grad_sink, dataclasses.replace(tables, transfer=turn), plan, x)
    replicas, (x, params) = gradients_in_turn(replicas, (wait_for(x, count, replicas), params), count)
    return x, params, grad_sink, replicas

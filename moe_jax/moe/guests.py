"""Guests of one layer, fetched before the layer starts: copies of experts whose homes are on other devices.

Enters: this device's share of the bank, doors for gradients (`sink`), the layer's tables, and the plan that a step is
compiled for. Leaves: ({name: [Gs, ...]}, doors of the same shapes), Gs guest slots; or None where the plan fetches
nothing ahead. Inside `shard_map`.
"""

from __future__ import annotations

import dataclasses

from moe_jax.collectives.ordering import gradients_in_turn, wait_for, wait_for_tree
from moe_jax.collectives.sparse import open_guests
from moe_jax.collectives.varying import cast_varying, varying_axes
from moe_jax.moe.layer import LayerPlan


def fetch_guests(bank, sink, tables, plan: LayerPlan | None, like):
    """Return (guests {name: [Gs, ...]} of one layer, doors for their gradients), or None where the plan has none.

    They depend on the bank and the tables alone: called before attention, the transfer can run beside it. Their
    gradients leave through the doors, in the dtype of `sink`, and are summed into its cotangent.

    Args:
      bank, sink, tables: of this layer, as `make_moe`'s function takes them.
      like: array that varies over all mesh axes over which the tokens do.
    """
    if plan is None or plan.transfer is None:
        return None
    bank, sink = cast_varying((bank, sink), varying_axes(like))
    return open_guests(bank, tables.home_row, sink, tables.transfer, plan.transfer)


def fetch_in_turn(x, params, gather, bank, sink, tables, plan: LayerPlan | None):
    """Return (x, gathered params, sink, guests): what a layer needs before it starts, in an order that XLA:CPU keeps.

    Where the guests' rounds differ by layer, or guests come after the gate, collectives stand in branches (see
    `moe_jax.collectives.ordering`). So the branch waits for x and the parameters, and x, from which all other
    collectives of the layer follow, for the branch. On the way back the branch waits for the gradients of x and of the
    gathered parameters, the sums of those over devices wait for the branch, and the layer before for the sums.

    Args:
      x: what enters the layer.
      params: its dense parameters; gather(params) returns them as the layer computes with them.
      bank, sink, tables, plan: as `fetch_guests` takes them.
    """
    if plan is None or not plan.branches:
        return x, gather(params), sink, fetch_guests(bank, sink, tables, plan, x)
    count = tables.transfer.layer
    x, params = gradients_in_turn(x, params, count)
    params = gather(wait_for_tree(params, count, x))
    (x, params), sink = gradients_in_turn((x, params), sink, count)
    if plan.transfer is None:
        return x, params, sink, None
    turn = dataclasses.replace(tables.transfer, layer=wait_for(count, count, x, params))
    guests = fetch_guests(bank, sink, dataclasses.replace(tables, transfer=turn), plan, x)
    guests, (x, params) = gradients_in_turn(guests, (wait_for(x, count, guests), params), count)
    return x, params, sink, guests

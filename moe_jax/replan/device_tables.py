"""From a host placement to the step: its tables as the step's inputs.

Inputs: a host `Skeleton` and the `Tables` that fill it, [L, D, ...]. Outputs: the `LayerPlan` that a step is compiled
for, and device tables [D, L, ...] as NumPy arrays. Only this file uses both kinds of tables.
Letters: docs/notation.md.
"""

from __future__ import annotations

import numpy as np

from moe_jax import placement as host
from moe_jax.after_gate import Rule
from moe_jax.collectives.transfer_plan import Transfer, TransferPlan
from moe_jax.dispatch import Tables
from moe_jax.moe.layer import LayerPlan


def layer_plan(
    skeleton: host.Skeleton,
    axes: tuple[str, ...],
    rule: Rule | None = None,
    shares: dict[str, float] | None = None,
) -> LayerPlan:
    """Return what a step is compiled for.

    Args:
      skeleton: of the plans to come.
      axes: mesh axes of the expert-parallel group.
      rule: what is decided after the gate.
      shares: `trans_share` and `agg_share` of a `LayerPlan`, where a block-wise schedule splits transfers.
    """
    return LayerPlan(
        home_slots=skeleton.home_slots,
        replica_slots=skeleton.replica_slots if has_replicas(skeleton) else 0,
        bucket_rows=skeleton.bucket_rows or None,
        transfer=TransferPlan(
            method=skeleton.method,
            rounds=skeleton.rounds,
            home_slots=skeleton.home_slots,
            replica_slots=skeleton.replica_slots,
            axes=axes,
        )
        if has_replicas(skeleton) and (rule is None or rule.ahead)
        else None,
        after_gate=rule,
        **(shares or {}),
    )


def has_replicas(skeleton: host.Skeleton) -> bool:
    """Say whether plans of this skeleton can hold replicas."""
    return bool(skeleton.replica_slots and (skeleton.rounds or skeleton.gather_slots or skeleton.broadcast_slots))


def device_tables(skeleton: host.Skeleton, placement: host.Placement) -> Tables:
    """Return the step's tables for a placement that fits the skeleton; NumPy, leading dim D."""
    tables = host.fill_tables(skeleton, placement)
    groups = skeleton.home_slots + (skeleton.replica_slots if has_replicas(skeleton) else 0)
    device, slot = np.divmod(tables.dest_slot, skeleton.slots)
    return Tables(
        dest_slot=_by_device(device * groups + slot),
        dest_num=_by_device(tables.dest_num),
        dest_den=_by_device(tables.dest_den),
        home_row=_by_device(np.where(tables.home_row < 0, skeleton.bank_rows, tables.home_row)),
        slot_expert=_by_device(tables.slot_to_expert[:, :, :groups]),
        transfer=_transfer(skeleton, tables) if has_replicas(skeleton) else None,
    )


def table_shapes(skeleton: host.Skeleton) -> Tables:
    """Return the shapes and dtypes of every plan of a skeleton, as arrays of a plan with even homes and no replicas."""
    return device_tables(skeleton, _bare(skeleton))


def _bare(skeleton: host.Skeleton) -> host.Placement:
    """Return even homes on the skeleton's devices, which fit any skeleton of that many."""
    sizes = (skeleton.layers, skeleton.experts, skeleton.devices, skeleton.devices_per_node)
    return host.Placement.even(*sizes, rule="home")


def _transfer(skeleton: host.Skeleton, tables: host.Tables) -> Transfer:
    layers, devices = skeleton.layers, skeleton.devices
    if skeleton.method in ("shift", "permute"):
        rows = tables.send_row.swapaxes(1, 2)  # [L, D, T]
        take = tables.recv_slot.swapaxes(1, 2)
    elif skeleton.method == "gather":
        rows = tables.gather_row
        take = np.where(tables.replica_from < 0, devices * skeleton.gather_slots, tables.replica_from)
    else:
        owner, row = np.divmod(tables.broadcast_row, skeleton.bank_rows)  # [L, Y]; a pad of -1 has no owner
        rows = np.where(owner[:, None] == np.arange(devices)[:, None], row[:, None], -1)
        take = np.where(tables.replica_from < 0, skeleton.broadcast_slots, tables.replica_from)
    return Transfer(
        send=_by_device(_home_slots(rows, tables.home_row)),
        take=_by_device(take),
        layer=np.broadcast_to(np.arange(layers, dtype=np.int32), (devices, layers)).copy(),
    )


def _home_slots(rows: np.ndarray, home_row: np.ndarray) -> np.ndarray:
    """Return the home slot behind each bank row: rows [L, D, n], home_row [L, D, Hs] -> [L, D, n], Hs for none."""
    same = (rows[..., None] == home_row[:, :, None]) & (rows[..., None] >= 0)
    return np.where(same.any(axis=-1), same.argmax(axis=-1), home_row.shape[-1])


def _by_device(array: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(np.swapaxes(array, 0, 1))
    return array if array.dtype == np.uint32 else array.astype(np.int32)

"""One plan format for every balancer: Placement, what a step is compiled for, and the arrays that it reads."""

from moe_jax.placement.bank import bank_rows, most_homes, reshard_permutation
from moe_jax.placement.placement import RULES, SHARE_ONE, Placement
from moe_jax.placement.plan_shape import PlanShape, build_shape, fits, grow, misfits, needed_transfer
from moe_jax.placement.tables import Tables, fill_tables, table_shapes
from moe_jax.placement.transfer_sizes import TransferSizes, transfer_sizes

__all__ = [
    "RULES",
    "SHARE_ONE",
    "Placement",
    "PlanShape",
    "Tables",
    "TransferSizes",
    "bank_rows",
    "build_shape",
    "fill_tables",
    "fits",
    "grow",
    "misfits",
    "most_homes",
    "needed_transfer",
    "reshard_permutation",
    "table_shapes",
    "transfer_sizes",
]

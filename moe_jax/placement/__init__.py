"""One plan format for every balancer: Placement, and its split into a static skeleton and arrays."""

from moe_jax.placement.bank import bank_rows, most_homes, reshard_permutation
from moe_jax.placement.placement import RULES, SHARE_ONE, Placement
from moe_jax.placement.tables import (
    Skeleton,
    Tables,
    bucket_rows,
    build_skeleton,
    fill_tables,
    fits,
    split,
    widen,
)

__all__ = [
    "RULES",
    "SHARE_ONE",
    "Placement",
    "Skeleton",
    "Tables",
    "bank_rows",
    "bucket_rows",
    "build_skeleton",
    "fill_tables",
    "fits",
    "most_homes",
    "reshard_permutation",
    "split",
    "widen",
]

"""How tokens become rows and rows become tokens again, on one device. See README.md."""

from moe_jax.dispatch.route import Choice, Grouping, Parcel, Routing, largest_bucket, pack, regroup, route
from moe_jax.dispatch.rows import groups_to_rows, rows_to_groups, rows_to_tokens, tokens_to_rows

__all__ = [
    "Choice",
    "Grouping",
    "Parcel",
    "Routing",
    "groups_to_rows",
    "largest_bucket",
    "pack",
    "regroup",
    "route",
    "rows_to_groups",
    "rows_to_tokens",
    "tokens_to_rows",
]

"""How tokens become rows and rows become tokens again, on one device. See README.md."""

from moe_jax.dispatch.route import Choice, Grouping, Parcel, Routing, largest_bucket, pack, regroup, route
from moe_jax.dispatch.rows import groups_to_rows, rows_to_groups, rows_to_tokens, tokens_to_rows
from moe_jax.dispatch.tables import Tables, destinations, even_tables, local

__all__ = [
    "Choice",
    "Grouping",
    "Parcel",
    "Routing",
    "Tables",
    "destinations",
    "even_tables",
    "groups_to_rows",
    "largest_bucket",
    "local",
    "pack",
    "regroup",
    "route",
    "rows_to_groups",
    "rows_to_tokens",
    "tokens_to_rows",
]

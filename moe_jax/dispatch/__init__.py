"""How tokens become rows and rows become tokens again, on one device. See README.md."""

from moe_jax.dispatch.permute import permute_rows, permute_tokens, unpermute_rows, unpermute_tokens
from moe_jax.dispatch.route import (
    Choice,
    Grouping,
    Parcel,
    Routing,
    largest_bucket,
    members_of,
    pack,
    passes_of,
    regroup,
    regroup_pieces,
    route,
    stack_rows,
    stacked_row,
)
from moe_jax.dispatch.tables import Tables, destinations, even_tables, local

__all__ = [
    "Choice",
    "Grouping",
    "Parcel",
    "Routing",
    "Tables",
    "destinations",
    "even_tables",
    "largest_bucket",
    "local",
    "members_of",
    "pack",
    "passes_of",
    "permute_rows",
    "permute_tokens",
    "regroup",
    "regroup_pieces",
    "route",
    "stack_rows",
    "stacked_row",
    "unpermute_rows",
    "unpermute_tokens",
]

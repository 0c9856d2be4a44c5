"""How tokens become rows and rows become tokens again, on one device. See README.md."""

from moe_jax.dispatch.by_choice import Lines, from_lines, lines_of_tokens, to_lines, tokens_of_lines
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
    "Lines",
    "Parcel",
    "Routing",
    "Tables",
    "destinations",
    "even_tables",
    "from_lines",
    "largest_bucket",
    "lines_of_tokens",
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
    "to_lines",
    "tokens_of_lines",
    "unpermute_rows",
    "unpermute_tokens",
]

"""The tables and figures of the five papers, computed again: a file per paper, and `moe_jax.reproduce`, the command."""

"""Compare planners over a recorded trace of expert loads; `python -m moe_jax.replay` is the command. See README.md."""

"""Split the CPU into several devices, for runs without a cluster."""

from __future__ import annotations

from moe_jax.errors import UserError


def set_up_devices(count: int | None) -> None:
    """Split the CPU into `count` devices; must come before jax looks for devices."""
    import jax

    if count is None:
        return
    if count < 1:
        raise UserError(f"--host_devices ({count}) must be at least 1")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    # With several CPU devices a program from a warm cache hangs between two collectives (jax 0.10.2).
    jax.config.update("jax_enable_compilation_cache", False)

"""Rows that travel to their experts in float8: `MoEConfig.dispatch_dtype = 'float8_e4m3'`.

An exchange moves bytes (`kernels/float8_blocks.py`) instead of rows, half as many as bfloat16 has. Rows are quantised
before it and brought back after it, once each, whether or not they leave the device: results do not depend on the mesh.
The gradient is straight through, in the compute dtype, as if nothing had been rounded.

Source: DeepSeek-V3 Technical Report (2024), section 3.3.3: tokens are dispatched in float8 with scales of powers of
two, and combined in bfloat16. That report also sends the gradients that go to experts in float8; here they are not.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from moe_jax.kernels.float8_blocks import bytes_to_rows, rows_to_bytes


def exchange_float8(send: Callable, rows, metadata):
    """Return send(rows, metadata) of rows [R, M], sent as bytes; their gradient is exchanged as it is."""
    dim, dtype = rows.shape[-1], rows.dtype

    @jax.custom_vjp
    def exchange(rows, metadata):
        with jax.named_scope("dispatch"):
            sent = rows_to_bytes(rows)
        received = send(sent, metadata)
        with jax.named_scope("dispatch"):
            return bytes_to_rows(received, dim, dtype)

    def forward(rows, metadata):
        like = jnp.zeros_like(rows, shape=(rows.shape[0], 0))  # carries R, a dtype and no bytes
        return exchange(rows, metadata), (like, metadata)

    def backward(residuals, d):
        like, metadata = residuals
        zeros = jnp.zeros_like(like, shape=(like.shape[0], dim))
        (drows,) = jax.vjp(lambda rows: send(rows, metadata), zeros)[1](d)
        return drows, None

    exchange.defvjp(forward, backward)
    return exchange(rows, metadata)

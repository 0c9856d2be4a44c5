"""Compare a transport of rows with the padded all-to-all on the run's own mesh: there and back, and its gradient.

Inputs: the mesh's roles, a transport and the width of a row. Outputs: how many entries differ, for several ways in
which rows may be spread over the devices. An exchange only moves numbers, and these are whole numbers of at most 8
bits, which every dtype holds: a correct result is equal, bit by bit.

Letters: docs/notation.md.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from moe_jax.collectives.exchange import exchange_counts, make_exchange
from moe_jax.mesh import Roles

BLOCK_ROWS = 48
UNUSED = 77  # value of the rows of a block that are not in use, which the transport must not read


def exchange_axes(roles: Roles) -> tuple[str, ...]:
    """Return the axes of the widest group that exchanges rows in any schedule: experts' devices and their shards."""
    return roles.expert + roles.expert_shard


def spreads(devices: int, peers: int, rows: int) -> dict[str, np.ndarray]:
    """Return {name: int32 [Nd, P]}, rows that each device sends to each peer: full, uneven with empties, one, none."""
    rng = np.random.default_rng(0)
    uneven = rng.integers(0, rows + 1, (devices, peers)) * (rng.random((devices, peers)) < 0.7)
    one = np.zeros((devices, peers))
    one[:, peers - 1] = rows
    single = np.zeros((devices, peers))
    single[0, 0] = 1
    named = {"full": np.full((devices, peers), rows), "uneven": uneven, "all to one": one, "a single row": single}
    return {name: counts.astype(np.int32) for name, counts in (named | {"none": np.zeros((devices, peers))}).items()}


def compare_exchange(
    roles: Roles, transport: str, width: int, dtype: str, instead: str = "all_to_all", options: dict | None = None
) -> dict[str, int]:
    """Return, for each of `spreads`, in how many entries a transport and the proven one differ.

    All processes of a job call it together; all get the same numbers. The rows are exchanged as tokens are: to the
    experts' devices, multiplied there by a number of that device, and back; then the gradients of that.

    Args:
      transport: as in `MoEConfig`; instead: the one it is compared with.
      width: M; dtype: of the rows.
      options: for the compiler.

    Raises:
      whatever lowering, compiling or running it raises.
    """
    devices, peers = roles.num_devices, roles.size(exchange_axes(roles))
    compare = comparison(roles, transport, instead, width, dtype, options)
    sharding = roles.sharding(roles.all)  # one row of counts for each device
    found = {}
    for name, counts in spreads(devices, peers, BLOCK_ROWS).items():
        sent = jax.make_array_from_callback(counts.shape, sharding, lambda index, counts=counts: counts[index])
        found[name] = int(compare(sent))
    return found


def comparison(roles: Roles, transport: str, instead: str, width: int, dtype: str, options: dict | None = None):
    """Return compiled compare(sent int32 [Nd, P], sharded over all axes) -> int32, entries that differ."""
    axes = exchange_axes(roles)
    peers = roles.size(axes)
    local = min(peers, roles.config.devices_per_node)
    shape = (peers, BLOCK_ROWS, width)

    def whole_numbers(me, salt):
        index = jnp.arange(peers * BLOCK_ROWS * width, dtype=jnp.int32).reshape(shape)
        return ((index * 7 + me * 31 + salt) % 255 - 127).astype(dtype)

    def compare(sent):
        sent = sent[0]
        received = exchange_counts(sent, axes, peers)
        me = jax.lax.axis_index(roles.all)
        factor = jnp.exp2((me % 3).astype(jnp.float32)).astype(dtype)
        used = (jnp.arange(BLOCK_ROWS)[None] < sent[:, None])[:, :, None]
        x, d_back = (jnp.where(used, whole_numbers(me, salt), jnp.zeros((), dtype)) for salt in (0, 5))

        def there_and_back(exchange, x):
            return exchange(exchange(x, sent, received) * factor, received, sent)

        def both(name, x):
            exchange = make_exchange(axes, peers, name, local)
            back, pull_back = jax.vjp(lambda x: there_and_back(exchange, x), x)
            return exchange(x, sent, received), back, *pull_back(d_back)

        sends_used = transport == "ragged"  # it alone sends only the rows in use
        got = both(transport, jnp.where(used, x, jnp.array(UNUSED, dtype)) if sends_used else x)
        want = both(instead, x)
        return sum(jnp.sum(a != b, dtype=jnp.int32) for a, b in zip(got, want, strict=True))[None]

    spread = P(roles.all)
    each = jax.shard_map(compare, mesh=roles.mesh, in_specs=spread, out_specs=spread)
    return jax.jit(lambda sent: jnp.sum(each(sent)), out_shardings=roles.sharding(), compiler_options=options or {})

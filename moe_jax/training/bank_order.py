"""The expert bank in the order of a file: by (layer, expert), independent of mesh and placement.

Inputs: one leaf of a segment's bank, [D Rb, ...] over the expert axis, and the home of every expert. Outputs: the same
numbers as [L, E, ...], the expert dim over that axis; and the way back. Both run on the devices, layer by layer, so
that no device ever holds more than one layer's experts beside its own part. Where every expert's home is the device
that stores it in the file (plain expert parallelism), nothing moves between devices. Values are copied, never computed
with.
Letters: docs/notation.md; e experts of a layer on one device in the file.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.collectives.varying import cast_varying, varying_axes
from moe_jax.models.leaf_names import is_bank, segment_of
from moe_jax.placement import Placement, bank_rows

Homes = np.ndarray | dict[str, np.ndarray]  # int [L, E]; of several segments with experts {segment: that}


@dataclasses.dataclass(frozen=True)
class FileOrder:
    """The move between bank and file for one mesh and one set of homes.

    Attributes:
      home: int32 [L, E], device of each expert within its expert-parallel group.
      rows: int32 [L, E], bank row of each expert on that device.
    """

    home: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, home: np.ndarray) -> FileOrder:
        """Return the order for homes int [L, E]; rows are numbered as `bank_rows` numbers them."""
        placement = Placement(np.asarray(home))
        return cls(home=placement.home, rows=bank_rows(placement))

    def file_shape(self, leaf) -> tuple[int, ...]:
        """Return the shape [L, E, ...] that a bank leaf (an array or ShapeDtypeStruct) has in the file."""
        return (*self.home.shape, *leaf.shape[1:])

    def to_file(self, leaf: jax.Array) -> jax.Array:
        """Return [L, E, ...] from a bank leaf [D Rb, ...]."""
        return _to_file(leaf.sharding, self._exchanges(leaf))(leaf, self.home, self.rows)

    def from_file(self, stored: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        """Return the bank leaf that `leaf` describes from stored [L, E, ...]; rows without an expert become zero."""
        bank_size = leaf.shape[0] // group_size(leaf.sharding)
        return _from_file(leaf.sharding, self._exchanges(leaf), bank_size)(stored, self.home, self.rows)

    def _exchanges(self, leaf) -> bool:
        """Say whether some expert's home is another device than the one that stores it in the file's order."""
        devices, (_, experts) = group_size(leaf.sharding), self.home.shape
        assert experts % devices == 0 and leaf.shape[0] % devices == 0, (self.home.shape, leaf.shape, devices)
        assert self.home.max() < devices and self.rows.max() < leaf.shape[0] // devices, "homes of another mesh"
        return not np.all(self.home == np.arange(experts) // (experts // devices))


class FileOrders:
    """The order of every leaf of a state, from the homes of all experts."""

    def __init__(self, home: Homes):
        named = home if isinstance(home, dict) else {None: home}
        self._orders = {name: FileOrder.of(one) for name, one in named.items()}

    def of_leaf(self, name: str) -> FileOrder | None:
        """Return the order of the leaf of this name, None where it is not of the bank."""
        return self._orders[segment_of(name)] if is_bank(name) else None


def bank_axes(sharding: NamedSharding) -> tuple[str, ...]:
    """Return the mesh axes that split the bank's rows."""
    first = sharding.spec[0] if len(sharding.spec) else None
    return () if first is None else (first,) if isinstance(first, str) else tuple(first)


def group_size(sharding: NamedSharding) -> int:
    """Return D, the number of parts of the bank's rows."""
    return math.prod(sharding.mesh.shape[axis] for axis in bank_axes(sharding))


def file_sharding(sharding: NamedSharding) -> NamedSharding:
    """Return the sharding of [L, E, ...] for a bank leaf's sharding of [D Rb, ...]."""
    return NamedSharding(sharding.mesh, P(None, bank_axes(sharding) or None, *sharding.spec[1:]))


@functools.lru_cache(maxsize=128)
def _to_file(sharding: NamedSharding, exchange: bool):
    axes, devices, out = bank_axes(sharding), group_size(sharding), file_sharding(sharding)

    def body(bank, home, rows):
        me = lax.axis_index(axes) if axes else 0
        held = home.shape[1] // devices

        def one_layer(layer):
            home_E, rows_E = layer
            if not exchange:
                return jnp.take(bank, lax.dynamic_slice_in_dim(rows_E, me * held, held), axis=0)
            mine = jnp.take(bank, jnp.where(home_E == me, rows_E, 0), axis=0)  # [E, ...], those of others are not read
            arrived = lax.all_to_all(mine.reshape(devices, held, *mine.shape[1:]), axes, 0, 0)  # [source, e, ...]
            return arrived[lax.dynamic_slice_in_dim(home_E, me * held, held), jnp.arange(held)]

        return lax.map(one_layer, (home, rows))

    moved = jax.shard_map(body, mesh=sharding.mesh, in_specs=(sharding.spec, P(), P()), out_specs=out.spec)
    return jax.jit(moved, out_shardings=out)


@functools.lru_cache(maxsize=128)
def _from_file(sharding: NamedSharding, exchange: bool, bank_size: int):
    axes, devices, stored = bank_axes(sharding), group_size(sharding), file_sharding(sharding)

    def body(experts, home, rows):
        me = lax.axis_index(axes) if axes else 0
        held = home.shape[1] // devices

        def one_layer(bank, layer):
            experts_e, home_E, rows_E = layer
            if exchange:
                experts_E = lax.all_gather(experts_e, axes, tiled=True)
                places = jnp.where(home_E == me, rows_E, bank_size)
                return bank.at[places].set(experts_E, mode="drop"), None
            places = lax.dynamic_slice_in_dim(rows_E, me * held, held)
            return bank.at[places].set(experts_e, mode="drop"), None

        bank = cast_varying(jnp.zeros((bank_size, *experts.shape[2:]), experts.dtype), varying_axes(experts))
        return lax.scan(one_layer, bank, (experts, home, rows))[0]

    moved = jax.shard_map(body, mesh=sharding.mesh, in_specs=(stored.spec, P(), P()), out_specs=sharding.spec)
    return jax.jit(moved, out_shardings=sharding)

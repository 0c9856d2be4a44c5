"""Make global arrays on the mesh from arrays that every process has whole.

Inputs: NumPy arrays and shardings. Outputs: `jax.Array`s.
"""

from __future__ import annotations

import jax
import numpy as np


def to_devices(arrays, shardings):
    """Return NumPy arrays as global arrays; every process gives the same arrays and places its own part.

    Args:
      arrays: pytree of NumPy arrays.
      shardings: matching pytree, or one sharding for all.
    """

    def one(array, sharding):
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    if isinstance(shardings, jax.sharding.Sharding):
        return jax.tree.map(lambda array: one(array, shardings), arrays)
    return jax.tree.map(one, arrays, shardings)

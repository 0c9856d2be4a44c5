"""Places in sorted arrays: NumPy's, by either method, and no loop in the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.moe.routing import Choice, regroup, route
from moe_jax.parallel.bucket_rows import bucket_layout
from moe_jax.parallel.sorted_search import MOST_COMPARED, first_places


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("rows", "length", "values"), [(1, 40, 9), (3, 5, 30), (1, 0, 3), (2, 2000, 70)])
def test_places_are_those_of_numpy(rows, length, values, side):
    array = np.sort(np.random.default_rng(length).integers(0, values, (rows, length)).astype(np.int32), axis=1)
    wanted = np.arange(-1, values - 1, dtype=np.int32)
    got = first_places(jnp.asarray(array), jnp.asarray(wanted), side=side)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, [np.searchsorted(row, wanted, side=side) for row in array])
    assert (rows * length * values > MOST_COMPARED) == (length == 2000)


def test_routing_has_no_loop():
    """Both methods; a sort is no loop of the program's."""

    def routed(ids, counts):
        choice = Choice(ids, jnp.ones(ids.shape), jnp.ones(ids.shape, bool))
        return route(choice, ids // 2, ids % 2, 4, 2), regroup(counts, bucket_layout(64, len(counts)))

    for tokens in (8, 8192):
        text = jax.jit(routed).lower(jnp.zeros((tokens, 2), jnp.int32), jnp.zeros((4, 2), jnp.int32)).as_text()
        assert "while" not in text and "sort" in text

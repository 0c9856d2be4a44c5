"""Rows that travel among devices of equal place and are gathered over the shards: equal to the one-device layer."""

import jax
import numpy as np
import pytest
from support.layer_cases import draw, drop_groups, make_loss, moe_config, reference, roles_of

from moe_jax.errors import UserError
from moe_jax.moe.build import make_moe
from moe_jax.moe.schedules import ScheduleOptions

# (schedule, (N_MP, N_ESP), tokens on one expert): groups that are the same; MP over two EP members; the rest
CASES = [("s1", (2, 2), False), ("s2", (2, 2), True), ("s1", (4, 2), True)]
SLOW = [("s1", (1, 4), True), ("s1", (4, 1), False), ("s2", (4, 2), False), ("s1", (1, 1), True)]


@pytest.mark.parametrize(
    ("schedule", "pair", "skewed"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_coordinated_equals_reference(schedule, pair, skewed):
    config = moe_config(schedule, transport="coordinated", grouped_matmul="reference")
    roles = roles_of(*pair)
    with jax.enable_x64(True):
        step = jax.jit(jax.value_and_grad(make_loss(config, roles), (0, 1, 2), has_aux=True))
        (got, (y, loads, _)), grads = step(*draw(skewed))
        (want, (want_y, want_loads)), want_grads = reference(config, drop_groups(schedule, roles), skewed)
    np.testing.assert_allclose(float(got), float(want), rtol=1e-12)
    np.testing.assert_array_equal(np.sum(loads, axis=0), want_loads)
    for a, b in zip(jax.tree.leaves((want_y, want_grads)), jax.tree.leaves((y, grads)), strict=True):
        assert np.max(np.abs(np.asarray(a) - np.asarray(b))) <= 1e-12 * np.max(np.abs(a))


def test_coordinated_is_refused_where_it_means_nothing():
    with pytest.raises(UserError, match="schedules s1 and s2"):
        make_moe(moe_config("deepspeed", transport="coordinated"), roles_of(2, 2), np.zeros((16, 4)), "gelu")
    with pytest.raises(UserError, match="MoEConfig.gather"):
        ScheduleOptions(transport="coordinated", gather="saa")

"""The schedule that docs/adding_a_schedule.md shows: read from the page, registered, and equal to the reference."""

import pathlib
import textwrap

import jax
import pytest
from support.layer_cases import assert_near, draw, make_loss, moe_config, reference, roles_of

from moe_jax.moe.schedule import SCHEDULES

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "adding_a_schedule.md"


@pytest.fixture
def registered():
    """Run the page's code; its schedule `mine` is there for as long as a test lasts."""
    lines = GUIDE.read_text(encoding="utf-8").split("\n1. ")[0].splitlines()
    exec(textwrap.dedent("\n".join(line for line in lines if line.startswith("    ") or not line)), {})
    yield
    del SCHEDULES["mine"]


@pytest.mark.usefixtures("registered")
def test_the_schedule_of_the_guide_equals_the_dense_layer_but_for_bfloat16():
    config, roles = moe_config("mine"), roles_of(2, 2)
    with jax.enable_x64(True):
        got, grads = jax.jit(jax.value_and_grad(make_loss(config, roles), (0, 1, 2), has_aux=True))(*draw(True))
        want, want_grads = reference(config, roles.mesh.size, True)
    assert assert_near((got[1][0], grads), (want[1][0], want_grads), 0.02) > 1e-6

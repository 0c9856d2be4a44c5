"""Two halves of a device's sequences: what is refused, and what their statistics say. Equality: test_prefetch.py."""

import dataclasses

import jax
import numpy as np
import pytest
from support.prefetch_cases import BATCH, LENGTH, VOCAB, model_config, moe_config, placements_of, run

from moe_jax.errors import UserError
from moe_jax.mesh import MeshConfig, build_mesh
from moe_jax.models import LanguageModel, make_loss


def build(mesh, batch=BATCH, model=None, **moe):
    config = model_config(overlap="halves", **(model or {}))
    roles = build_mesh(MeshConfig(**mesh), jax.devices()[: np.prod([size for size in mesh.values()])])
    layer = dataclasses.replace(moe_config(moe.pop("schedule", "s1")), **moe)
    whole = LanguageModel(config=config, moe=layer, vocab_size=VOCAB, roles=roles)
    return make_loss(whole, whole.layout(), batch, LENGTH)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh": {"expert": 8}}, "cuts the 1 sequences of a device into two halves; make train.batch_size an even"),
        ({"mesh": {"data": 2}, "schedule": "dp"}, r"ModelConfig.overlap \('halves'\) has nothing to move"),
        ({"mesh": {"expert": 2}, "schedule": "pairwise"}, "ModelConfig.overlap needs a MoEConfig.schedule whose"),
    ],
    ids=["odd", "dp", "pairwise"],
)
def test_what_cannot_run_in_halves_is_refused(arguments, message):
    with jax.enable_x64(True), pytest.raises(UserError, match=message):
        build(**arguments)


def test_statistics_count_every_token_of_both_halves():
    """Loads, entropy and drops of the two halves add up to those of the whole batch."""
    config = model_config(layers=1)
    placements, shape = placements_of(False, config.moe_layers, 2, number=1)
    with jax.enable_x64(True):
        whole, halves = (
            run(dataclasses.replace(config, overlap=overlap), "s1", {"expert": 2}, shape, placements)[0][2]
            for overlap in ("none", "halves")
        )
    np.testing.assert_array_equal(whole.loads, halves.loads)
    assert int(np.asarray(halves.loads).sum()) == config.moe_layers * BATCH * LENGTH * 2
    np.testing.assert_allclose(whole.gate_entropy, halves.gate_entropy, rtol=1e-12)

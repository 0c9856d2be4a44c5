"""How many layers' replicas the compiled gradient holds at once, as XLA's buffer assignment tells.

Two programs that differ only in `refetch_replicas`: without it the forward keeps the replicas of all L layers for the
backward, with it those of a layer or two are alive. Replicas are made large against everything else (6 slots a
device of 256 KiB, 32 tokens a device), so the difference in temporary bytes counts layers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.models import Batch, LanguageModel, ModelConfig, make_loss
from moe_jax.moe import MoEConfig
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import build_shape, fill_tables

DEVICES, EXPERTS, LAYERS, SLOTS, VOCAB, BATCH, LENGTH = 4, 8, 6, 6, 32, 16, 8
MODEL_DIM, HIDDEN_DIM = 128, 256
LAYER_BYTES = SLOTS * 2 * MODEL_DIM * HIDDEN_DIM * 4  # replicas of one layer


@functools.cache
def temporary_bytes(prefetch, case, refetch_replicas):
    """Return the temporary bytes of the gradient with every expert on every device."""
    roles = build_mesh(MeshConfig(), jax.devices()[:DEVICES])
    config = ModelConfig(
        layers=LAYERS, model_dim=MODEL_DIM, heads=2, hidden_dim=HIDDEN_DIM, loss_chunk=64, max_length=LENGTH,
        prefetch=prefetch, prefetch_case=case, refetch_replicas=refetch_replicas,
    )  # fmt: skip
    moe = MoEConfig(num_experts=EXPERTS, bucket_slack=float(DEVICES))
    model = LanguageModel(config=config, moe=moe, vocab_size=VOCAB, roles=roles)
    even = Placement.even(LAYERS, EXPERTS, DEVICES, DEVICES)
    replicas = [index for index in np.ndindex(LAYERS, EXPERTS, DEVICES) if even.home[index[:2]] != index[2]]
    placement = even.replace(replicas=np.array(replicas, np.int32))
    shape = build_shape(placement)
    layout = model.layout()
    params = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=roles.sharding(*spec)),
        model.shapes(),
        layout.params,
    )
    loss = make_loss(model, layout, BATCH, LENGTH, plan={"segment_0": shape})
    ids, weights = (jax.ShapeDtypeStruct((BATCH, LENGTH), dtype) for dtype in (jnp.int32, jnp.float32))
    arguments = (
        Batch(ids, ids, weights),
        {"segment_0": fill_tables(shape, placement)},
        jax.random.key(0),
        0,
        np.float32(1),
    )
    compiled = jax.jit(jax.grad(loss, has_aux=True)).lower(params, *arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("prefetch", "case", "alive"),
    [("hecate", "split", 2), pytest.param("pro_prophet", "expert", 3, marks=pytest.mark.slow)],
)
def test_refetch_replicas_keeps_a_layer_or_two_of_replicas(prefetch, case, alive):
    """One layer of replicas, or two, and one more while a transfer is in flight."""
    kept, again = (temporary_bytes(prefetch, case, refetch_replicas) for refetch_replicas in (False, True))
    layers = (kept - again) / LAYER_BYTES
    print(f"\n{prefetch}: {kept} bytes without, {again} with: {layers:.2f} layers of replicas less")
    assert layers > LAYERS - alive - 0.5

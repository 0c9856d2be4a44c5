"""What the compiled gradient keeps in memory, per device, as XLA's buffer assignment tells.

The loop over layers closes over the bank, which holds the experts of all layers. Plain autodiff of such a loop adds a
gradient as large as the bank in every turn; a branch that reads the bank inside the loop saves a copy of it in every
turn. Either would make the memory grow with layers squared. The grad_sink (`moe_jax.moe.bank`) prevents the first.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.marks import slow_but

from moe_jax.models import Batch, LanguageModel, ModelConfig, make_loss
from moe_jax.moe import MoEConfig
from moe_jax.moe.routing import even_tables
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import build_shape, table_shapes

DEVICES, EXPERTS, VOCAB = 4, 8, 32


@functools.cache
def gradient_of(*, layers, model_dim, hidden_dim, batch, length, slack, shape=None, how=()):
    """Return (model, compiled gradient of the loss) for a small model under expert parallelism.

    Args:
      shape: of plans with replicas; how: further pairs of the ModelConfig.
    """
    roles = build_mesh(MeshConfig(), jax.devices()[:DEVICES])
    config = ModelConfig(
        layers=layers, model_dim=model_dim, heads=2, hidden_dim=hidden_dim, loss_chunk=64, max_length=length,
        **dict(how),
    )  # fmt: skip
    moe = MoEConfig(num_experts=EXPERTS, bucket_slack=slack)
    model = LanguageModel(config=config, moe=moe, vocab_size=VOCAB, roles=roles)
    layout = model.layout()
    params = jax.tree.map(lambda leaf, spec: leaf.update(sharding=roles.sharding(*spec)), model.shapes(), layout.params)
    ids, weights = (jax.ShapeDtypeStruct((batch, length), dtype) for dtype in (jnp.int32, jnp.float32))
    plan = {"segment_0": shape or shape_of(layers)}
    step = jax.jit(jax.grad(make_loss(model, layout, batch, length, plan=plan), has_aux=True))
    tables = {"segment_0": table_shapes(shape) if shape else even_tables(layers, EXPERTS, DEVICES)}
    arguments = (params, Batch(ids, ids, weights), tables, jax.random.key(0), np.int32(0), np.float32(1))
    return model, step.lower(*arguments).compile()


def shape_of(layers, ahead=None):
    """Return the shape of plans over two nodes of two devices, with so many replicas."""
    even = build_shape(Placement.even(layers, EXPERTS, DEVICES, DEVICES // 2))
    return dataclasses.replace(even, candidates=2, ahead=ahead)


def bank_bytes(model):
    """Return the bytes of one device's part of the bank."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.shapes()["bank"])) // DEVICES


def test_gradient_holds_the_bank_s_gradient_once():
    """Six layers against two, with weights large and tokens few, and three overflow passes in the program.

    Compared: temp bytes, which do not hold arguments and results. The loop stacks the layers' gradients, one bank in
    all, before they go to their places in the bank: that is in temp, and so are one layer's weights and what the
    backward needs of 32 rows of a layer. So six layers stay under two banks, and four more layers add less than their
    own weights. One bank more per layer would make seven, one more per overflow pass four.
    """
    few, many = (
        gradient_of(layers=layers, model_dim=128, hidden_dim=256, batch=16, length=4, slack=1.0) for layers in (2, 6)
    )
    temp = [compiled.memory_analysis().temp_size_in_bytes for _, compiled in (few, many)]
    bank = [bank_bytes(model) for model, _ in (few, many)]
    assert many[1].memory_analysis().output_size_in_bytes > bank[1]  # the bank's gradient itself
    assert temp[1] < 2 * bank[1]
    assert temp[1] - temp[0] < bank[1] - bank[0]


@pytest.mark.parametrize(
    ("prefetch", "alive"),
    slow_but([("hecate", 2), ("pro_prophet", 3)], ("hecate", 2)),
)
def test_refetch_replicas_keeps_a_layer_or_two_of_replicas(prefetch, alive):
    """One layer of replicas, or two, and one more while a transfer is in flight, instead of those of all six.

    Every expert is on every device: 6 replicas of 256 KiB next to 32 tokens, so temporary bytes count layers of them.
    """
    layers, sizes = 6, {"model_dim": 128, "hidden_dim": 256, "batch": 16, "length": 8, "slack": float(DEVICES)}
    even = Placement.even(layers, EXPERTS, DEVICES, DEVICES)
    replicas = [index for index in np.ndindex(layers, EXPERTS, DEVICES) if even.home[index[:2]] != index[2]]
    shape, temp = build_shape(even.replace(replicas=np.array(replicas, np.int32))), []
    for again in (False, True):
        how = (("prefetch", prefetch), ("refetch_replicas", again))
        _, compiled = gradient_of(layers=layers, **sizes, shape=shape, how=how)
        temp.append(compiled.memory_analysis().temp_size_in_bytes)
    less = (temp[0] - temp[1]) / (6 * 2 * 128 * 256 * 4)
    print(f"\n{prefetch}: {temp[0]} bytes without, {temp[1]} with: {less:.2f} layers of replicas less")
    assert less > layers - alive - 0.5

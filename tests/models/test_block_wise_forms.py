"""Block-wise forms of a layer give the plain loop's loss and gradients, whatever the layer's backward reads.

float64, two devices with replicas, 1e-10 of each leaf's largest entry. The plain loop is compared with the reference in
test_equality.py and, with adapters, in training/test_lora.py.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support.covering import covering_cases
from support.equality_cases import BATCH, EXPERTS, KEY, LENGTH, VOCAB, assert_close, data
from support.placements import to_bank
from support.prefetch_cases import model_config, moe_config, placements_of

from moe_jax.models import LanguageModel, make_loss
from moe_jax.models.config import LoraConfig
from moe_jax.models.lora import base_of, is_adapter, joined, part_of
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.parallel.static_sizes import BucketRows
from moe_jax.planning.plan_shape import fill_tables

PLAIN = {"prefetch": "none", "overlap": "none", "refetch_replicas": False, "remat": "none", "stack": "scan"}
FACTORS = {
    "schedule": ("deduplicated", "s1", "s2"),
    "prefetch": ("none", "hecate", "pro_prophet"),
    "overlap": ("none", "halves"),
    "refetch_replicas": (False, True),
    "remat": ("block", "none", "dots"),
    "stack": ("scan", "unrolled"),
    "shared": ("learned", "sum", "none"),
    "lora": (False, True),
    "rows": (1000, 16),  # of a bucket: one pass, or several
}


def is_block_wise(case):
    return case["prefetch"] != "none" or (case["overlap"] == "halves" and not case["refetch_replicas"])


NEVER = ({"prefetch": "none", "overlap": "none"}, {"prefetch": "none", "refetch_replicas": True})
COMPUTED_AGAIN = {"schedule": "deduplicated", "remat": "block", "shared": "learned", "lora": False, "rows": 1000}
FORMS = {"prefetch": "hecate", "overlap": "halves", "refetch_replicas": False, "stack": "scan"}
ALWAYS = {**COMPUTED_AGAIN, **FORMS}  # the gradient of w_mix reads what `deduplicated` does not
SLOW = (
    {**COMPUTED_AGAIN, **FORMS, "overlap": "none", "refetch_replicas": True, "shared": "none", "lora": True},
    {**COMPUTED_AGAIN, **FORMS, "prefetch": "none"},
    {**COMPUTED_AGAIN, **FORMS, "prefetch": "none", "stack": "unrolled"},
    {**COMPUTED_AGAIN, **FORMS, "prefetch": "pro_prophet", "overlap": "none"},
    *covering_cases(FACTORS, is_block_wise, NEVER),
)


def gradients(schedule, shared, lora, rows, **how):
    """Return (loss, gradients of what is trained) of two layers under a placement with replicas."""
    experts = {"none": {}, "sum": {"shared_experts": 1}, "learned": {"shared_experts": 1, "residual": "learned"}}
    config = model_config(layers=2, **how)
    moe = dataclasses.replace(moe_config(schedule), **experts[shared])
    targets = ("attention/out", "experts", *(("shared_experts",) if shared != "none" else ()))
    model = LanguageModel(
        config=config, moe=moe, vocab_size=VOCAB, roles=build_mesh(MeshConfig(expert=2), jax.devices()[:2]),
        lora=LoraConfig(rank=3, targets=targets) if lora else LoraConfig(),
    )  # fmt: skip
    (placement,), shape = placements_of(False, 2, 2, number=1)
    shape = dataclasses.replace(shape, bucket_rows=BucketRows.even(rows))
    layout, tables = model.layout(), {"segment_0": fill_tables(shape, placement)}
    loss = make_loss(model, layout, BATCH, LENGTH, plan={"segment_0": shape})
    rng, params = np.random.default_rng(5), jax.jit(model.init)(jax.random.key(7))
    params = jax.tree.map_with_path(
        lambda path, leaf: rng.normal(size=leaf.shape) * 0.3 if is_adapter(path[-1].key) else np.asarray(leaf), params
    )
    # whose experts they are in the drawn bank does not matter
    experts = jax.tree.map(lambda leaf: leaf.reshape(2, EXPERTS, *leaf.shape[1:]), params["bank"])
    params["bank"] = to_bank(experts, placement, shape.bank_rows)
    base, trained = (base_of(params), part_of(params, is_adapter)) if lora else ({}, params)

    def of_trained(trained, base):
        rest = data("float64", False), tables, KEY, np.int32(0), float(BATCH * LENGTH)
        return loss(joined(base, trained), *rest)[0]

    return jax.jit(jax.value_and_grad(of_trained))(trained, base)


plain_gradients = functools.cache(functools.partial(gradients, **PLAIN))


@pytest.mark.parametrize(
    "case",
    [ALWAYS, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda case: "-".join(str(value) for value in case.values()),
)
def test_equals_the_plain_loop(case):
    with jax.enable_x64():
        got = gradients(**case)
        want = plain_gradients("s1", case["shared"], case["lora"], 1000)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-12)
    assert_close(got[1], want[1], case=case)

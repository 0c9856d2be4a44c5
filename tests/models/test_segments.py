"""Models whose layers differ: what a config may say, the mesh they lie on, and equality with the reference."""

import jax
import numpy as np
import pytest
from routers.dense_router import Groups, dense_route
from support import equality_cases
from support.equality_cases import BATCH, KEY, LENGTH, assert_equal, build, moe_config
from support.marks import slow_but

from moe_jax.errors import UserError
from moe_jax.models import Batch, ModelConfig, make_loss
from moe_jax.models.config import segments_of, with_experts
from moe_jax.moe import MoEConfig
from moe_jax.parallel.mesh import MeshConfig, build_mesh

PYRAMID = (
    "layers=1 num_experts=2", "layers=2 moe_every=2 num_experts=4 hidden_dim=20", "layers=2 num_experts=8 top_k=3",
)  # fmt: skip


def model_config(segments, **changes):
    layers = sum(int(text.split()[0].removeprefix("layers=")) for text in segments)
    return equality_cases.model_config(segments=segments, layers=layers, **changes)


def route_of(config, moe):
    """Return the dense route of all layers, where a segment has another router than `topk`; else None."""
    segments, layers = with_experts(segments_of(config, moe)), []
    for segment in segments:
        groups = Groups(drop_groups=1, local=np.ones((1, segment.moe.num_experts), bool))
        layers += [dense_route(segment.moe, KEY, BATCH * LENGTH, groups)] * segment.config.moe_layers
    only_topk = all(segment.moe.router == "topk" for segment in segments)
    return None if only_topk else lambda layer, gate, x: layers[layer](layer, gate, x)


# segments, mesh, ZeRO stage, further changes of model and layer
CASES = {
    # EP 2, 4 and 8, replicated 4, 2 and 1 times; buckets that hold all, which compiles faster
    "pyramid": (PYRAMID, {"expert": 8}, 1, {}, {"bucket_slack": 16.0}),
    # two data-parallel groups, MP; a dense first layer; replicas of EP 2 within and across the groups; stages one by
    # one; two routers, one with a state; buckets that overflow
    "dense_first_data2_mp2_zero3": (
        ("layers=2 moe_every=0", "layers=1 num_experts=2", "layers=1 num_experts=8 router=sigmoid_bias"),
        {"data": 2, "expert": 4, "model": 2}, 3, {"prefetch": "hecate", "dense_hidden_dim": 20}, {"bucket_slack": 0.5},
    ),
    # the MP group of 4 is larger than the EP group of 2, and as large as that of 4
    "mp4": (("layers=1 num_experts=2", "layers=1 num_experts=4"), {"expert": 8, "model": 4}, 1, {}, {"schedule": "s1"}),
    "pyramid_unrolled": (PYRAMID, {"expert": 8}, 1, {"remat": "block", "stack": "unrolled"}, {}),
    "esp2_mp2_capacity": (
        ("layers=1 num_experts=2", "layers=1 num_experts=4"), {"expert": 4, "expert_shard": 2, "model": 2}, 1, {},
        {"schedule": "s2", "capacity_factor": 4.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", slow_but(CASES, "dense_first_data2_mp2_zero3"))
def test_segments_equal_the_reference_float64(case):
    segments, mesh, zero, changes, layer = CASES[case]
    with jax.enable_x64(True):
        config, moe = model_config(segments, **changes), moe_config(**layer)
        stats = assert_equal(case, config, moe, mesh, zero, route=route_of(config, moe))
    if case == "dense_first_data2_mp2_zero3":
        assert int(np.max(stats.passes)) > 1, "this case is here to overflow"


def test_one_segment_lowers_to_the_same_program():
    """A model of one segment, said in any way, is the program of a model without segments."""

    def program(**changes):
        config = equality_cases.model_config("float32", **changes)
        moe = moe_config(num_experts=4)
        model = build(config, moe, {"expert": 4})
        layout = model.layout()
        loss = make_loss(model, layout, 8, LENGTH)
        batch = Batch(*(jax.ShapeDtypeStruct((8, LENGTH), dtype) for dtype in (np.int32, np.int32, np.float32)))
        arguments = (model.shapes(), batch, model.even_tables(), jax.random.key(0), np.int32(0), np.float32(1))
        return jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(*arguments).as_text()

    assert program() == program(segments=("layers=2",))


def test_short_forms():
    def runs(**changes):
        config = ModelConfig(layers=9, first_dense=1, moe_every=2, **changes)
        return [
            (s.config.layers, s.config.moe_every, s.moe.num_experts, s.first_layer, s.depth)
            for s in segments_of(config, MoEConfig(num_experts=16))
        ]

    assert runs() == [(1, 0, 16, 0, 9), (8, 2, 16, 0, 9)]


BAD = {
    "sum": ({"segments": ("layers=2", "layers=3")}, r"segments have 2 \+ 3 = 5 layers, but ModelConfig.layers is 4"),
    "word": ({"segments": ("layers=2 expert=3", "layers=2")}, r"segments\[0\] .*'expert=3' is none of layers=N"),
    "twice": ({"segments": ("layers=2 layers=2", "layers=2")}, "says layers twice"),
    "no layers": ({"segments": ("num_experts=2",)}, "must say how many layers"),
    "odd": ({"segments": ("layers=1 moe_every=2", "layers=3")}, r"layers of segment 0 \(1\) must be divisible by"),
    "router": ({"segments": ("layers=1 router=topks", "layers=3")}, r"segment 0 .*topks"),
    "nameless": ({"segments": ("layers=1 router=", "layers=3")}, r"'router=' is none of layers=N.* router=NAME"),
    "both": ({"segments": ("layers=4",), "first_dense": 1}, "leave out the one or the other"),
    "dense": ({"first_dense": 4}, r"first_dense \(4\) must be at least 0 and below ModelConfig.layers \(4\)"),
    "none": ({"moe_every": 0}, "leaves no layer with experts"),
    "top_k": (
        {"segments": ("layers=1", "layers=3 num_experts=1")},
        r"segment 1 of the model .*top_k \(2\) must be at most MoEConfig.num_experts \(1\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_segments_are_one_line(name):
    changes, message = BAD[name]
    with pytest.raises(UserError, match=message) as caught:
        segments_of(ModelConfig(**{"layers": 4, **changes}), MoEConfig(num_experts=8, top_k=2))
    assert "\n" not in str(caught.value)


def test_expert_axis_is_cut_for_few_experts():
    roles = build_mesh(MeshConfig(expert=8, devices_per_node=4), jax.devices(), experts=(2, 4, 16))
    assert dict(roles.mesh.shape) == {"data": 1, "expert": 2, "expert_of_4": 2, "expert_of_2": 2, "expert_shard": 1}
    assert roles.expert == ("expert", "expert_of_4", "expert_of_2")
    four = roles.for_experts(4)
    assert (four.data, four.expert) == (("data", "expert"), ("expert_of_4", "expert_of_2"))
    assert (four.config.data, four.config.expert, four.members_per_node) == (2, 4, 4)
    assert four.dense == roles.dense and four.all == roles.all
    assert roles.for_experts(16) is roles and roles.for_experts(2).size(roles.for_experts(2).expert) == 2
    assert roles.for_experts(6) is roles and roles.most_homes(6) == 1  # six of the eight have one
    with pytest.raises(UserError, match="expert-parallel groups of 4 and of 6 devices do not lie inside one another"):
        build_mesh(MeshConfig(expert=12), [jax.devices()[0]] * 12, experts=(4, 6))

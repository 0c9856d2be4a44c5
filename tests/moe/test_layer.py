"""MoELayer against the one-device reference in float64, and the README's example of it."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax.moe
from moe_jax.errors import UserError
from moe_jax.moe import MoEConfig, MoELayer, reference_moe
from moe_jax.moe.routers.scores import gate_noise
from moe_jax.parallel import few_kernels
from moe_jax.parallel.mesh import MeshConfig, build_mesh

ROOT = pathlib.Path(__file__).parents[2]
EXPERTS, MODEL_DIM, HIDDEN_DIM, TOKENS = 8, 8, 12, (4, 16)


def roles_of(devices, **sizes):
    return build_mesh(MeshConfig(**sizes), jax.devices()[:devices])


def layer_of(roles, config, dtype=jnp.float32, activation="gelu"):
    return MoELayer(
        config,
        model_dim=MODEL_DIM,
        hidden_dim=HIDDEN_DIM,
        roles=roles,
        rngs=nnx.Rngs(0),
        activation=activation,
        dtype=dtype,
    )


# devices, data, what differs from the default layer, activation, whether expert 3 is the first choice of every token.
# In the capacity cases each device's 8 tokens are one drop group.
CASES = {
    "one_device": (1, 1, {"gate_noise": 0.5}, "gelu", False),
    "ep4_data2": (8, 2, {"gate_noise": 0.5, "renormalize": False}, "swiglu", False),
    "ep2_shared": (2, 1, {"shared_experts": 2, "shared_hidden_dim": 5, "residual": "learned"}, "swiglu", False),
    "ep8_all_to_one": (8, 1, {"bucket_slack": 0.5}, "gelu", True),
    "as_on_gpus": (4, 2, {}, "gelu", False),
    "ep8_drop": (8, 1, {"capacity_factor": 1.0, "min_capacity": 1, "drop": "probability"}, "gelu", True),
}


@pytest.mark.parametrize("name", CASES)
def test_layer_equals_reference(name, monkeypatch):
    devices, data, changes, activation, skewed = CASES[name]
    if name.startswith("as_on_gpus"):  # the forms that other platforms than a CPU run
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **others: default(*args))
        monkeypatch.setattr(few_kernels, "MOST_COMPARED", 0)
    config = MoEConfig(num_experts=EXPERTS, aux_loss_weight=0.3, z_loss_weight=0.2, **changes)
    with jax.enable_x64(True):
        roles = roles_of(devices, data=data)
        graph, state = nnx.split(layer_of(roles, config, jnp.float64, activation))
        x, weight = np.random.default_rng(1).normal(size=(2, *TOKENS, MODEL_DIM))
        if skewed:  # feature 0 is positive everywhere, and expert 3 alone looks at it
            x[..., 0] = 2.0
            state["w_gate"][...] = state["w_gate"][...].at[0, 3].add(20.0)
        key = jax.random.key(5)

        def ours(state, x):
            y, loss, loads = nnx.merge(graph, state)(x, noise_key=key)
            return jnp.sum(y * weight) + loss, (y, loss, loads)

        ids = jnp.arange(np.prod(TOKENS), dtype=jnp.int32)
        noise = gate_noise(key, ids, EXPERTS, jnp.float64) if config.gate_noise else None

        def reference(state, x):
            experts = {name: value[...] for name, value in state["bank"].items()}
            y, balance, z, loads = reference_moe(
                x.reshape(-1, MODEL_DIM), state["w_gate"][...], experts, config, noise=noise, drop_groups=devices,
                shared={name: value[...] for name, value in state["shared"].items()} if config.shared_experts else None,
            )  # fmt: skip
            y, loss = y.reshape(x.shape), 0.3 * balance + 0.2 * z
            return jnp.sum(y * weight) + loss, (y, loss, loads)

        both = [jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True)) for f in (ours, reference)]
        (got, (got_y, got_loss, got_loads)), got_grads = both[0](state, x)
        (want, (want_y, want_loss, want_loads)), want_grads = both[1](state, x)
    assert got_loads.shape == (roles.size(roles.expert), EXPERTS) and got_loads.dtype == jnp.int32
    np.testing.assert_array_equal(np.sum(np.asarray(got_loads), axis=0), want_loads)
    for mine, wanted in ((got, want), (got_y, want_y), (got_loss, want_loss)):
        assert mine.dtype == jnp.float64
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-12 * np.max(np.abs(wanted)))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(want_grads)]
    weights = 3 if activation == "swiglu" else 2
    assert len(names) == 2 + weights + (weights + 1 if config.shared_experts else 0)  # x, the gate, weights, w_mix
    for leaf, mine, wanted in zip(names, jax.tree.leaves(got_grads), jax.tree.leaves(want_grads), strict=True):
        size = np.max(np.abs(wanted))
        assert size > 0, leaf
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-12 * size, err_msg=leaf)  # sums of < 1000 terms


def test_layer_loads_per_source():
    """The tokens of device (data, expert) are counted by source `expert`; data-parallel groups are summed."""
    config = MoEConfig(num_experts=EXPERTS, top_k=1)
    layer = layer_of(roles_of(8, data=2), config)
    layer.w_gate[...] = 10 * jnp.eye(MODEL_DIM)
    # 16 tokens, two a device; token i is one-hot at feature and thus expert wish[i]
    wish = [0, 0, 1, 1, 2, 3, 7, 7] + [4, 4, 1, 5, 2, 2, 7, 0]
    _, _, loads = layer(jnp.eye(MODEL_DIM)[np.array(wish)])
    # source s holds tokens 2s, 2s+1 of the first eight and of the last eight
    expected = np.zeros((4, EXPERTS), np.int32)
    for source, experts in enumerate(([0, 0, 4, 4], [1, 1, 1, 5], [2, 3, 2, 2], [7, 7, 7, 0])):
        np.add.at(expected[source], experts, 1)
    np.testing.assert_array_equal(loads, expected)


def test_layer_errors():
    layer = layer_of(roles_of(8), MoEConfig(num_experts=EXPERTS))
    for shape, message in (
        ((3, 4, MODEL_DIM), "got 12 tokens, which do not divide over 8 devices; pad the batch to a multiple"),
        ((0, MODEL_DIM), "the MoE layer got 0 tokens"),
        ((4, 16), r"takes tokens \[\.\.\., 8\] .* got an array of shape"),
        ((), r"takes tokens \[\.\.\., 8\] .* got an array of shape"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            layer(jnp.zeros(shape))
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"MoEConfig.schedule \('teleport'\) is unknown; choose one of .*deepspeed"):
        layer_of(roles_of(8), MoEConfig(num_experts=EXPERTS, schedule="teleport"))
    with pytest.raises(ValueError, match=r"activation \('relu'\) is unknown; choose one of gelu, swiglu"):
        layer_of(roles_of(1), MoEConfig(num_experts=EXPERTS), activation="relu")


def test_the_public_names_are_these():
    """A failure here is a question: break other people's programs?"""
    names = (
        "GateStats GroupedWeights MoEConfig MoELayer balance_loss choose_experts grouped_matmul make_moe reference_moe"
    )
    assert list(moe_jax.moe.__all__) == names.split()


def test_readme_example():
    """The README's loop is at most 20 lines, runs as it stands, on all devices, and learns."""
    section = (ROOT / "README.md").read_text().partition("## The layer in your own model\n")[2]
    example = re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1)
    assert len([line for line in example.splitlines() if line.strip()]) <= 20
    names = {}
    exec(compile(example.replace("range(50)", "range(1)"), "README.md", "exec"), names)
    first = float(names["loss"])
    exec(compile(example, "README.md", "exec"), names)
    assert float(names["loss"]) < 0.5 * first
    assert names["loads"].shape == (8, 8) and np.sum(names["loads"]) == 2 * 256


def test_a_bias_that_nothing_moves_is_told(caplog):
    for router in ("topk", "sigmoid_bias"):
        layer_of(roles_of(1), MoEConfig(num_experts=EXPERTS, router=router))
    (said,) = caplog.messages
    assert "router 'sigmoid_bias': nothing moves choice_bias between the steps of a MoELayer; take another" in said

"""Optimizers: which leaves decay, updates by hand, the same numbers on any mesh; clipping; the learning rate."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.marks import slow_but

from moe_jax.config.train_config import TrainConfig
from moe_jax.errors import UserError
from moe_jax.models import LanguageModel, ModelConfig
from moe_jax.models.language_model import segment_of
from moe_jax.moe import MoEConfig
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.planning.placement import Placement, bank_rows
from moe_jax.storage.bank_order import reshard
from moe_jax.storage.checkpoint import Checkpointer
from moe_jax.training.optimizer import build_learning_rate, build_optimizer, decays, muon_dims
from moe_jax.training.step import abstract_state, build_state_shardings

LAYERS, EXPERTS, VOCAB = 2, 8, 64
SIZES = {"layers": 2 * LAYERS, "moe_every": 2, "model_dim": 16, "heads": 2, "hidden_dim": 32, "max_length": 8}


def config_of(name, **fields):
    name, _, narrow = name.partition("+")
    fields = {"first_moment_dtype": "bfloat16", **fields} if narrow else fields
    fields = {"learning_rate": 0.1, "warmup_steps": 0, **fields}
    return TrainConfig(optimizer=name, steps=9, **fields)


def model_on(data, expert, zero=1, moe=None, **changes):
    return LanguageModel(
        config=ModelConfig(**SIZES, **changes),
        moe=MoEConfig(num_experts=EXPERTS, **(moe or {})),
        vocab_size=VOCAB,
        roles=build_mesh(MeshConfig(data=data, expert=expert), jax.devices()[: data * expert]),
        zero_stage=zero,
    )


def test_which_leaves_decay_and_which_are_muons():
    """Norms, biases, the gate and a learned mix are spared; an FFN's or an expert's weight called w_gate is no gate."""
    moe = {"shared_experts": 1, "residual": "learned"}
    leaves = jax.tree.leaves_with_path(model_on(1, 1, activation="swiglu", moe=moe).shapes())
    named = {"/".join(entry.key for entry in path): (path, leaf) for path, leaf in leaves}
    hidden = ["attention/out", "attention/qkv", "dense/w_gate", "dense/w_in", "dense/w_out"]
    hidden += ["dense_attention/out", "dense_attention/qkv", "shared/w_gate", "shared/w_in", "shared/w_out"]
    hidden = [f"dense/units/segment_0/{leaf}" for leaf in hidden]
    assert "dense/units/segment_0/shared/w_mix" in named
    hidden = [*(f"bank/segment_0/{leaf}" for leaf in ("w_gate", "w_in", "w_out")), *hidden]
    assert sorted(name for name, (path, _) in named.items() if muon_dims(path)) == hidden
    decayed = {name for name, (path, leaf) in named.items() if decays(path, leaf)}
    assert decayed == {*hidden, "dense/embedding/tokens", "dense/embedding/positions"}


def one_update(config, params, grads):
    optimizer = build_optimizer(config)
    return optimizer.update(grads, optimizer.init(params), params)


def tree(bank, qkv, tokens):
    return {
        "bank": {"segment_0": {"w_in": bank}},
        "dense": {"embedding": {"tokens": tokens}, "units": {"segment_0": {"attention": {"qkv": qkv}}}},
    }


NO_DECAY = {"weight_decay": 0.0, "clip_norm": 0.0}


def test_muon_takes_each_matrix_by_itself():
    """Gradients c x I with c from 0 to 1,000: each expert's update has one length, and none has none.

    I / |I| has all singular values 8^-1/2; five steps of s <- 3.4445 s - 4.775 s^3 + 2.0315 s^5 make them one value,
    and the update is 0.2 sqrt(8) times it, with Nesterov's momentum as with none: all gradients point one way.
    """
    identity = jnp.eye(8)
    bank = jnp.stack([scale * identity for scale in (0, 1, 10, 1000)])
    qkv = jnp.stack([scale * identity for scale in (1, 100, 10_000)], axis=1).reshape(1, 8, 3, 2, 4)
    grads = tree(bank, qkv, jnp.full((4, 8), 2.0))
    updates, _ = one_update(config_of("muon", **NO_DECAY), jax.tree.map(jnp.ones_like, grads), grads)
    s = 8**-0.5
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    want = -0.1 * 0.2 * 8**0.5 * s * np.eye(8)
    for expert in (1, 2, 3):
        np.testing.assert_allclose(updates["bank"]["segment_0"]["w_in"][expert], want, atol=1e-5)
    np.testing.assert_array_equal(updates["bank"]["segment_0"]["w_in"][0], np.zeros((8, 8)))
    projections = updates["dense"]["units"]["segment_0"]["attention"]["qkv"].reshape(8, 3, 8)
    for index in range(3):
        np.testing.assert_allclose(projections[:, index], want, atol=1e-5)
    # an embedding is Adam's: the first update is the sign of the gradient
    np.testing.assert_allclose(updates["dense"]["embedding"]["tokens"], np.full((4, 8), -0.1), rtol=1e-5)


class Run:
    """Updates on one mesh from gradients that are known by (layer, expert)."""

    def __init__(self, config, data, expert, zero=1):
        self.model = model_on(data, expert, zero)
        self.optimizer = build_optimizer(config)
        self.state_shardings = build_state_shardings(self.model, self.optimizer)
        self.abstract = abstract_state(self.model, self.optimizer, self.state_shardings)
        self.placement = Placement.even(LAYERS, EXPERTS, expert)

        def update(state, grads):
            updates, opt_state = self.optimizer.update(grads, state["opt_state"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            return {"step": state["step"] + 1, "params": params, "opt_state": opt_state}

        self.update = jax.jit(update, out_shardings=self.state_shardings.state)

    @property
    def homes(self):
        return {"segment_0": self.placement.home}

    def params(self, seed, scale):
        """Random leaves by name, experts in the order of the file."""
        rng = np.random.default_rng(seed)
        at = (self.placement.home * (LAYERS * EXPERTS // self.placement.devices) + bank_rows(self.placement)).ravel()

        def one(path, leaf):
            values = (scale * rng.standard_normal(leaf.shape)).astype(np.float32)
            if path[0].key == "bank":
                bank = np.empty_like(values)
                bank[at] = values
                values = bank
            return jax.device_put(values, leaf.sharding)

        return jax.tree_util.tree_map_with_path(one, self.abstract["params"])

    def start(self):
        params = self.params(0, 0.1)
        make = lambda p: {"step": jnp.zeros((), jnp.int32), "params": p, "opt_state": self.optimizer.init(p)}  # noqa: E731
        self.state = jax.jit(make, out_shardings=self.state_shardings.state)(params)

    def steps(self, first, last):
        for seed in range(first, last):
            self.state = self.update(self.state, self.params(seed, 1.0))

    def move(self, seed):
        home = np.random.default_rng(seed).permutation(self.placement.home.ravel()).reshape(LAYERS, EXPERTS)
        new = self.placement.replace(home=home.astype(np.int32))
        self.state = reshard(self.state, self.placement, new, LAYERS * EXPERTS // new.devices, "segment_0")
        self.placement = new


# of each mesh to the largest entry of a leaf: sums run in another order, and one of 8 bits may round the other way
TOLERANCES = {"adamw": 2e-5, "muon+bfloat16": 2**-7}


@pytest.mark.parametrize("name", slow_but(TOLERANCES, "muon+bfloat16"))
def test_every_mesh_gives_the_same_numbers(name, tmp_path):
    """Four updates on one device; on eight two, a move of experts, one, a checkpoint, and one on another mesh.

    What both save at the end is compared leaf by leaf, by (layer, expert): parameters and the optimizer's whole state.
    The gradients are clipped, so a norm over all devices is in it.
    """
    config = config_of(name)
    checkpoints = {step: Checkpointer(tmp_path / str(step), keep=3) for step in ("one", "eight")}
    one = Run(config, 1, 1)
    one.start()
    one.steps(1, 5)
    checkpoints["one"].save(4, one.state, one.homes, {})
    eight = Run(config, 2, 4)
    eight.start()
    eight.steps(1, 3)
    eight.move(seed=7)
    eight.steps(3, 4)
    checkpoints["eight"].save(3, eight.state, eight.homes, {})
    checkpoints["eight"].wait()
    same = checkpoints["eight"].restore(3, eight.abstract, eight.homes)
    jax.tree.map(np.testing.assert_array_equal, same, eight.state)  # a resumed run has the same bits
    other = Run(config, 4, 2, zero=3)
    other.state = checkpoints["eight"].restore(3, other.abstract, other.homes)
    other.steps(4, 5)
    checkpoints["eight"].save(4, other.state, other.homes, {})
    for checkpointer in checkpoints.values():
        checkpointer.close()
    ours, theirs = (checkpointer.read_arrays(4) for checkpointer in checkpoints.values())
    assert ours.keys() == theirs.keys()
    narrow = [leaf for leaf, values in ours.items() if values.dtype.name == "bfloat16"]
    assert all("/mu/" in leaf for leaf in narrow) and bool(narrow) == bool(config.first_moment_dtype)
    for leaf, want in ours.items():
        assert want.shape[:2] == (LAYERS, EXPERTS) or not segment_of(leaf), leaf
        got, want = theirs[leaf].astype(np.float32), want.astype(np.float32)
        np.testing.assert_allclose(got, want, atol=TOLERANCES[name] * np.abs(want).max(), rtol=0, err_msg=leaf)
    start, end = one.params(0, 0.1)["bank"]["segment_0"]["w_in"], ours["params/bank/segment_0/w_in"]
    assert np.abs(end - np.asarray(start).reshape(end.shape)).max() > 0.05  # it went somewhere


@pytest.mark.parametrize("clip_norm, scale", [(1.0, 1 / 5), (10.0, 1.0), (0.0, 1.0)])
def test_clip_is_by_the_global_norm(clip_norm, scale):
    """Of gradients of norm 5: sixteen entries of 3 / 4 have the norm 3, sixteen of 1 the norm 4. mu = (1 - b1) g."""
    grads = {"bank": {"w_in": jnp.full((8, 2), 0.75)}, "dense": {"table": jnp.full((2, 8), 1.0)}}
    optimizer = build_optimizer(TrainConfig(beta1=0.5, clip_norm=clip_norm))
    params = jax.tree.map(jnp.zeros_like, grads)
    _, state = optimizer.update(grads, optimizer.init(params), params)
    (moments,) = [part.mu for part in jax.tree.leaves(state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(part, "mu")]
    jax.tree.map(lambda mu, grad: np.testing.assert_allclose(mu, 0.5 * scale * grad, rtol=1e-6), moments, grads)


# peak 2, final share 0.1: with W = 10 from 2 / 10 at update 0 in a line to 2 at update 10
RISE = {0: 0.2, 5: 1.1, 10: 2.0}
CASES = {
    # by a cosine to 2 x 0.1: step 55 is half way down
    "cosine": ({}, {**RISE, 55: 1.1, 100: 0.2, 150: 0.2}),
    "cosine_without_rise": ({"warmup_steps": 0}, {0: 2.0, 50: 1.1, 100: 0.2}),
    # no room for 20 steps: three are left
    "cosine_short": ({"steps": 4, "warmup_steps": 20}, {0: 2 / 3, 3: 2.0, 4: 0.2}),
    "cosine_of_one": ({"steps": 1, "warmup_steps": 20}, {0: 2.0}),
    "constant": ({"learning_rate_schedule": "constant"}, {**RISE, 11: 2.0, 100: 2.0, 150: 2.0}),
    # 90 updates for a fall of 1.8: 0.02 each
    "linear": ({"learning_rate_schedule": "linear"}, {**RISE, 11: 1.98, 55: 1.1, 100: 0.2, 150: 0.2}),
    # stable up to update 80, then 20 updates for 1.8: 0.09 each
    "wsd": (
        {"learning_rate_schedule": "wsd", "decay_steps": 20},
        {**RISE, 11: 2.0, 80: 2.0, 81: 1.91, 90: 1.1, 100: 0.2, 150: 0.2},
    ),
    # a tenth of 100 steps
    "wsd_tenth": ({"learning_rate_schedule": "wsd"}, {**RISE, 90: 2.0, 95: 1.1, 100: 0.2}),
}


@pytest.mark.parametrize("case", CASES)
def test_schedules(case):
    fields, values = CASES[case]
    fields = {"steps": 100, "warmup_steps": 10, "learning_rate": 2.0, "final_learning_rate": 0.1, **fields}
    schedule = build_learning_rate(TrainConfig(**fields))
    traced = jax.jit(schedule)
    for step, value in values.items():
        np.testing.assert_allclose([schedule(step), traced(np.int32(step))], value, rtol=1e-6, err_msg=str(step))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"optimizer": "sgd"}, r"train.optimizer \('sgd'\) must be one of 'adamw', 'muon'"),
        ({"first_moment_dtype": "float16"}, r"train.first_moment_dtype \('float16'\) must be one of '', 'bfloat16'"),
        (
            {"learning_rate_schedule": "wsd", "steps": 30, "decay_steps": 11},
            r"train.warmup_steps \(20\) and train.decay_steps \(11\) must fit into train.steps \(30\) under 'wsd'; lo",
        ),
        ({"decay_steps": 5}, r"train.decay_steps \(5\) needs train.learning_rate_schedule = 'wsd'; under 'cosine' lea"),
    ],
)
def test_mistakes_are_one_line(fields, words):
    with pytest.raises(UserError, match=f"^[^\n]*{words}[^\n]*$"):
        TrainConfig(**fields)

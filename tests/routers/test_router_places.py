"""Where a router cannot work it says so in one line, before anything compiles; and what it reads of a mesh."""

import dataclasses
import pathlib
import re

import jax
import numpy as np
import pytest
from support import tiny_run
from support.layer_cases import draw, make_loss, moe_config, plan_of, roles_of
from support.options import layer_config

import moe_jax.moe.routers
from moe_jax.analysis.dry_run import dry_run
from moe_jax.config.gin_files import parse_run_config
from moe_jax.errors import UserError
from moe_jax.moe.routers import RouterPlace, build_router
from moe_jax.moe.routing import local
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.planning.balanced import Levelling
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import build_shape, fill_tables
from moe_jax.registry import ROUTERS
from moe_jax.training.program import build_program
from moe_jax.training.stepper import build_stepper

EXPERTS = 8
PACKAGE = pathlib.Path(moe_jax.moe.routers.__file__).parent


def place(slots=1, late=False, splits=True, **mesh):
    return RouterPlace(build_mesh(MeshConfig(**mesh), jax.devices()), slots, splits, late)


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        (("router = 'base'", "top_k = 1", "num_experts = 8", "train.batch_size = 8", "DataConfig.sequence_length = 12"),
         r"the 12 tokens that a device gates must be divisible by MoEConfig.num_experts \(8\) and by the 8 devices"),
        (("router = 'topology'", "Topology.remote_fraction = 0.1", "MeshConfig.devices_per_node = 1"),
         r"top_k \(2\) must be at most the 1 experts of a node .* \(8 experts on 8 nodes\)"),
        (("router = 'topology'", "Topology.remote_fraction = 0.1", "MeshConfig.devices_per_node = 4",
          "MeshConfig.model = 2", "schedule = 'deepspeed'"),
         r"set MoEConfig.schedule = 's1', 'pairwise' or 'ring', or MeshConfig.model = 1"),
        (("router = 'topology'", "Topology.remote_fraction = 0.1", "MeshConfig.devices_per_node = 4",
          "PlannerConfig.name = 'balanced'", "PlannerConfig.when = 'after_gate'", "PlannerConfig.replica_slots = 2",
          "PlannerConfig.cluster = 'configs/cluster/host_devices.gin'"),
         r"this plan decides that after the gate; set PlannerConfig.when = 'ahead'"),
        (("balance_over = 'sequence'", "schedule = 's1'", "MeshConfig.model = 2", "train.batch_size = 4"),
         r"balance_over \('sequence'\) needs whole sequences on a device, and it gates 16 tokens of sequences of 32"),
        (("router_dtype = 'float64'",), r"router_dtype \('float64'\) needs ModelConfig.dtype = 'float64'"),
        (("router = 'topology'", "cluster = 'no_such.gin'"), r"no_such"),
        (("router = 'topology'", "Topology.remote_fraction = 0.1", "MeshConfig.expert = 4",
          "MeshConfig.expert_shard = 2", "MeshConfig.devices_per_node = 1"),
         r"devices_per_node \(1\) must cut 4 expert-parallel members of MeshConfig.expert_shard \(2\) devices"),
        (("SigmoidBias.bias_rate = 0.01",), r"bias_rate \(0.01\) is read by .* = 'sigmoid_bias', not by 'topk'"),
        (("router = 'gshard'", "routed_scale = 2.5"), r"routed_scale \(2.5\) is not read by .* 'gshard'"),
    ],
)  # fmt: skip
def test_a_run_is_refused_before_it_compiles(bindings, message):
    """By a dry run, without devices, and by the program, before it is lowered."""
    with pytest.raises(UserError, match=message) as dry:
        run = config_of(bindings)
        dry_run(run, 8)
    with pytest.raises(UserError, match=message) as real:
        run = config_of(bindings)
        build_program(run, jax.devices())
    assert str(dry.value) == str(real.value) and "\n" not in str(real.value)


def config_of(bindings):
    names = [name if name[0].isupper() or name.startswith("train.") else f"MoEConfig.{name}" for name in bindings]
    sizes = ["ModelConfig.model_dim = 16", "train.batch_size = 8", "DataConfig.sequence_length = 32"]
    return parse_run_config([], sizes + names)[0]


def test_the_readme_s_bindings_build_a_program():
    """Every router's row of the package's table, on the demo's model and 8 devices."""
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|", (PACKAGE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for name, _ in rows} == set(ROUTERS)
    for name, rest in rows:
        needs = re.findall(r"`([\w.]+ = [^`]*)`", rest)
        bindings = [f"MoEConfig.router = {name!r}"]
        bindings += [need if need[0].isupper() else f"MoEConfig.{need}" for need in needs]
        config = parse_run_config(["configs/run/demo.gin"], [*bindings, "MeshConfig.devices_per_node = 4"])[0]
        assert config.moe.router == name
        build_program(config, jax.devices())


def test_local_experts_are_those_whose_tokens_stay_on_the_node():
    """Two nodes of four devices, an expert on each. Replicas: of expert 6 on device 1, 0 on 5, 2 on 7, and 7 on 6.

    By the rule of the nearest holder all tokens of these stay on their node; by that of the home only those of the
    devices that hold the replica. Halves of experts 6 and 7 go to either holder by the rule of shares: those of 6 leave
    any node.
    """
    places = place(slots=2, expert=8, devices_per_node=4)
    router = build_router(layer_config(num_experts=EXPERTS, router="topology", remote_fraction=0.2), places)
    replicas = np.array([[0, 6, 1], [0, 0, 5], [0, 2, 7], [0, 7, 6]])
    halves = np.array([[0, expert, device, 2**15, -1] for expert, device in ((6, 1), (6, 6), (7, 6), (7, 7))])
    spec = jax.sharding.PartitionSpec(places.roles.expert)
    for rule in ("nearest", "home", "shares"):
        want = np.zeros((8, EXPERTS), bool)
        want[:4, :4], want[4:, 4:] = True, True
        for _, expert, device in replicas:
            on_node = slice(device // 4 * 4, device // 4 * 4 + 4)
            want[device if rule == "home" else on_node, expert] = True
        if rule == "shares":
            want[:, 6] = False
        home = Placement.even(1, EXPERTS, 8, 4).home
        shares = halves if rule == "shares" else None
        placement = Placement(home, replicas, shares, rule, devices=8, devices_per_node=4)
        shape = build_shape(placement)
        router.place = RouterPlace(places.roles, shape.slots)

        def body(tables):
            return router.local_experts(jax.tree.map(lambda array: array[0], local(tables)))[None]

        found = jax.jit(jax.shard_map(body, mesh=places.roles.mesh, in_specs=(spec,), out_specs=spec))(
            fill_tables(shape, placement)
        )
        np.testing.assert_array_equal(found, want, rule)


WHOLE = (
    "MoEConfig.schedule = 'pairwise'", "PlannerConfig.name = 'fastermoe'", "PlannerConfig.when = 'after_gate'",
    "PlannerConfig.cluster = 'configs/cluster/host_devices.gin'", "PlannerConfig.replica_slots = 2",
)  # fmt: skip


@pytest.mark.slow
def test_fastermoes_gate_schedule_and_shadowing_run_together(tmp_path):
    """The gate asks where experts live, which shadowing after it leaves alone: choices and losses are those without."""
    gate = ("MoEConfig.router = 'topology'", "Topology.remote_fraction = 0.14", "MeshConfig.devices_per_node = 4")
    runs = [build_stepper(tiny_run.config_of(tmp_path, *gate, *more, "train.batch_size = 16"), jax.devices()).run(3)
            for more in ((), WHOLE)]  # fmt: skip
    for alone, whole in zip(*runs, strict=True):
        np.testing.assert_array_equal(alone["loads"], whole["loads"])
        np.testing.assert_allclose(whole["loss"], alone["loss"], rtol=1e-6)
    assert any(record["replicas"] for record in runs[1])


# what each router needs; `topology` refuses such planners
AFTER_GATE = {
    "topk": {}, "switch": {"top_k": 1, "capacity_factor": 1.0}, "noisy_topk": {}, "gshard": {"capacity_factor": 1.0},
    "base": {"top_k": 1}, "sigmoid_bias": {"expert_groups": 4, "kept_groups": 2}, "forced_balance": {},
    "group_limited": {"expert_groups": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", AFTER_GATE)
def test_counts_of_every_router_reach_a_planner_after_the_gate(name):
    """Where an MP group gates its tokens on each device: a rule sums counts over devices, which differ."""
    assert {*AFTER_GATE, "topology"} == set(ROUTERS)
    roles = roles_of(2, 2)
    config = moe_config("s2", router=name, **AFTER_GATE[name])
    shape = plan_of(roles, None)
    plan = dataclasses.replace(shape, candidates=shape.devices, after_gate=Levelling(sweeps=1))
    x, w_gate, experts, cotangent = draw(False, np.float32)
    leaves = build_router(config).leaves(x.shape[1])
    gate = {"w_gate": w_gate, **{leaf: np.zeros(size, np.float32) for leaf, size in leaves.items()}}
    jax.eval_shape(make_loss(config, roles, plan=plan), x, gate, experts, cotangent)

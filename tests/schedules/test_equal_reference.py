"""Every schedule equals the one-device layer: loss, outputs, loads and all gradients, in float64.

Tolerance 1e-12 of the largest entry of each array: sums of some hundred terms of order one, in another order. In
capacity mode the reference drops within the same groups of tokens. The suite runs a set of cases in which every two
values of any two factors meet; the full product stands behind the marker `slow` and prints a line for the table in
docs/results.md (pytest -m slow -s).
"""

import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from routers.dense_router import Groups, dense_route
from support.covering import covering_cases
from support.layer_cases import PAIRS, assert_near, draw, drop_groups, make_loss, moe_config, reference, roles_of
from support.program_order import overtaking

from moe_jax.cluster import Cluster, write_cluster
from moe_jax.moe.build import layer_sizes
from moe_jax.moe.reference import reference_expert, reference_moe
from moe_jax.moe.schedule import build_schedule, find_schedule, schedules
from moe_jax.parallel.mesh import MeshConfig, build_mesh

SCHEDULES = tuple(name for name in schedules() if find_schedule(name).moves_tokens)
FACTORS = {
    "schedule": SCHEDULES,
    "mp": (1, 2, 4),
    "esp": (1, 2, 4),
    "top_k": (1, 2),
    "skewed": (False, True),
    "capacity": (False, True),
    "data": (1, 2),
    "transport": ("all_to_all", "two_level"),
    "gather": ("saa", "aas"),
}


def is_valid(case):
    """With N_ESP = 4 and two data-parallel groups one expert-parallel member is left, and pairwise refuses."""
    return not (case["schedule"] == "pairwise" and case["data"] == 2 and case["esp"] == 4)


CASES = covering_cases(FACTORS, is_valid)


def name_of(case):
    mp, esp, limit = case["mp"], case["esp"], "capacity" if case["capacity"] else "dropless"
    skew = "skewed" if case["skewed"] else "uniform"
    rest = f"data{case['data']}-{case['transport']}-{case['gather']}"
    return f"{case['schedule']}-mp{mp}-esp{esp}-k{case['top_k']}-{skew}-{limit}-{rest}"


def build(case, grouped_matmul):
    """Return (config, roles, compiled step) of a case; the step does not depend on the tokens' skew."""
    changes = {"transport": case["transport"], "gather": case["gather"], "grouped_matmul": grouped_matmul}
    if case["schedule"] == "pairwise" and case["data"] == 1 and case["esp"] == 1:
        changes["pairwise_groups"] = 4  # two members a group
    config = moe_config(case["schedule"], case["top_k"], case["capacity"], **changes)
    roles = roles_of(case["mp"], case["esp"], data=case["data"])
    with jax.enable_x64(True):
        loss = jax.jit(jax.value_and_grad(make_loss(config, roles), (0, 1, 2), has_aux=True))
        compiled = loss.lower(*draw(case["skewed"])).compile()
    assert not overtaking(compiled.as_text()), "a collective may run next to a branch that holds others"
    return config, roles, compiled


def check(case, config, roles, compiled):
    """Compare one case; return the largest error of any array, relative to its largest entry, and the passes."""
    with jax.enable_x64(True):
        (got, (y, loads, passes)), grads = compiled(*draw(case["skewed"]))
        chosen = which(case, config, roles)
        (want, (want_y, want_loads)), want_grads = reference(config, drop_groups(chosen, roles), case["skewed"])
    np.testing.assert_array_equal(np.sum(loads, axis=0), want_loads)
    return assert_near((got, y, grads), (want, want_y, want_grads), 1e-12), int(passes)


def which(case, config, roles):
    """Return the schedule that runs: parm's choice, whose drop groups the reference needs."""
    if case["schedule"] != "parm" or roles.size(roles.model) == 1:
        return case["schedule"]
    return build_schedule("parm", roles, layer_sizes(config, roles, 64 // roles.size(roles.dense), None, 4, 8)).name


def own_case(schedule, pair, **changes):
    how = {"top_k": 2, "skewed": True, "capacity": False, "data": 1, "transport": "all_to_all", "gather": "saa"}
    return {"schedule": schedule, "mp": pair[0], "esp": pair[1], **how, **changes}


OWN = [own_case("dp", (1, 1), capacity=capacity, data=8) for capacity in (False, True)]
# rows that travel among devices of equal place: groups that are the same; MP over two EP members
OWN += [own_case("s1", pair, transport="coordinated", gather="aas") for pair in ((2, 2), (4, 2))]
OWN += [own_case("s2", (2, 2), transport="coordinated", gather="aas")]
# rows for two choices, where a device has several of a token's: of an odd number, and more than one row can hold
OWN += [own_case("deduplicated", pair, top_k=top_k, capacity=capacity, data=data) for pair, top_k, capacity, data in (
    ((1, 1), 6, False, 4), ((1, 4), 7, False, 1), ((2, 2), 5, True, 1), ((4, 2), 3, False, 1), ((1, 1), 8, False, 8)
)]  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *OWN], ids=name_of)
def test_schedule_equals_reference(case):
    check(case, *build(case, "reference"))


@pytest.mark.parametrize("router, taken", [("topk", "s2"), ("base", "deepspeed")])
def test_parm_equals_reference_where_tokens_are_gated_together(router, taken, tmp_path, caplog):
    """parm takes what pauses after the gate, and an MP group's tokens share a capacity or one auction."""
    free, key = (0.0, 0.0), jax.random.key(5)
    names = "gate", "regroup", "expert_step", "call", "all_to_all:8", "all_to_all:4x2"
    names += "all_gather:2", "all_reduce:2", "reduce_scatter:2"
    layers = {f"layer:{name}": (1.0 if name == taken else 2.0, 0.0, 0.0) for name in ("s1", "s2", "deepspeed")}
    cluster = Cluster(nodes=1, devices_per_node=8, fits={**dict.fromkeys(names, free), **layers})
    write_cluster(cluster, tmp_path / "c.json")
    changes = {"router": router, "cluster": str(tmp_path / "c.json"), "gather": "aas"}
    together = router == "base"
    config = moe_config("parm", 1 if together else 2, capacity=not together, **changes)
    roles = roles_of(2, 2)
    groups = drop_groups(taken, roles)
    with jax.enable_x64(True):
        drawn = draw(True)
        loss = make_loss(config, roles, noise_key=jax.random.fold_in(key, 0) if together else None)
        with caplog.at_level(logging.WARNING):
            (got, (y, loads, _)), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*drawn)
        assert f"'parm' takes {taken} by the whole-layer fits" in caplog.text
        if together:
            choose_experts = dense_route(config, key, len(drawn[0]), Groups(groups, np.ones((groups, 8), bool)))

        def dense(x, w_gate, experts, cotangent, groups=groups):
            route = (lambda x: choose_experts(0, {"w_gate": w_gate}, x)) if together else None
            y, balance, z, loads = reference_moe(x, w_gate, experts, config, drop_groups=groups, route=route)
            return jnp.sum(y * cotangent) + (1 if together else balance) + z, (y, loads)  # 1: loads are even

        (want, (want_y, want_loads)), want_grads = jax.value_and_grad(dense, (0, 1, 2), has_aux=True)(*drawn)
        if not together:  # in the groups of s1 other tokens would be dropped
            assert np.max(np.abs(dense(*drawn, groups=drop_groups("s1", roles))[1][0] - want_y)) > 0.1
    np.testing.assert_array_equal(np.sum(loads, axis=0), want_loads)
    assert_near((got, y, grads), (want, want_y, want_grads), 1e-12)


def test_drops_of_tied_tokens_do_not_depend_on_the_mesh():
    """On 1, 2 and 8 devices, one MP group each, an expert that is full takes the lowest ids of those that tie.

    Tokens are of zeros and ones, which the gate reads twice: those with as many ones have one probability, as the sum
    of the same eight terms in another order.
    """
    tokens, capacity = 40, 7
    config = moe_config("deepspeed", capacity_factor=0.7, min_capacity=1, drop="probability", renormalize=False)
    assert config.capacity(tokens) == capacity
    with jax.enable_x64(True):
        experts = draw(False)[2]
        x = np.random.default_rng(1).integers(0, 2, (tokens, 4)).astype(float)
        w_gate = np.concatenate([np.eye(4), np.eye(4)], axis=1)
        probs = np.exp(x @ w_gate) / np.sum(np.exp(x @ w_gate), axis=1, keepdims=True)
        want, queues = np.zeros_like(x), [[] for _ in range(8)]
        for token, row in enumerate(np.round(probs, 12)):
            for expert in np.argsort(-row, kind="stable")[:2]:
                queues[expert].append((-row[expert], token))
        assert max(map(len, queues)) > capacity
        for expert, queue in enumerate(queues):
            output = reference_expert(x, {name: leaf[expert] for name, leaf in experts.items()})
            for _, token in sorted(queue)[:capacity]:
                want[token] += probs[token, expert] * np.asarray(output[token])
        for devices in (1, 2, 8):
            roles = build_mesh(MeshConfig(expert=devices, model=devices), jax.devices()[:devices])
            _, (y, _, _) = jax.jit(make_loss(config, roles, tokens))(x, w_gate, experts, np.ones_like(x))
            np.testing.assert_allclose(y, want, atol=1e-12, err_msg=f"{devices} devices")


PRODUCT = list(itertools.product((*SCHEDULES, "s2-aas"), PAIRS))


@pytest.mark.slow
@pytest.mark.parametrize("schedule, pair", [*PRODUCT, ("dp", (1, 1))], ids=lambda value: str(value).replace(" ", ""))
def test_full_product(schedule, pair):
    worst, passes, cases = 0.0, 0, 0
    for top_k, capacity in itertools.product((1, 2), (False, True)):
        how = {"data": 8 if schedule == "dp" else 1, "gather": "aas" if schedule == "s2-aas" else "saa"}
        case = own_case(schedule.split("-")[0], pair, top_k=top_k, capacity=capacity, **how)
        built = build(case, "auto")
        for skewed in (False, True):
            error, taken = check({**case, "skewed": skewed}, *built)
            worst, passes, cases = max(worst, error), max(passes, taken), cases + 1
    print(f"\nproduct {schedule} {pair}: {cases} cases, largest error {worst:.1e}, up to {passes} passes")

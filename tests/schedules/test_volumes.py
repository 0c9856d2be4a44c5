"""What each schedule moves: the collectives of the lowered program against the formulas of `cluster/layer_seconds.py`.

Every collective of the program has to be one of the formula's, with its kind, group, elements and calls; floats and
integers apart. Buckets are wide enough for one pass, so that nothing stands in the program twice.
"""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.layer_cases import DIM, EXPERTS, TOKENS, draw, moe_config, plan_of, roles_of
from support.program_volumes import collectives, groups_of

from moe_jax.cluster.layer_seconds import FORMULAS, Transfer, index_transfers, layer_transfers
from moe_jax.moe.bank import open_grad_sink
from moe_jax.moe.build import layer_sizes, make_moe
from moe_jax.moe.routers import RouterInputs
from moe_jax.moe.routing import even_tables, local
from moe_jax.moe.schedule import LayerSizes, find_schedule, layer_shape
from moe_jax.moe.schedules.pairwise import choose_groups
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.parallel.sharding import expert_specs
from moe_jax.parallel.static_sizes import BucketRows

WIDE = {"bucket_slack": 100.0}
ROUNDS = "rounds"  # messages between pairs name no group
SCHEDULES = [name for name in FORMULAS if find_schedule(name).moves_tokens]
CASES = [(schedule, pair, {}) for schedule in SCHEDULES for pair in ((1, 2), (2, 4), (4, 2))]
CASES += [
    ("s2", (4, 2), {"gather": "aas"}),
    ("s1", (1, 1), {}),
    ("pairwise", (1, 1), {"pairwise_groups": 4}),
    ("pairwise", (1, 2), {"pairwise_groups": 2}),
    ("deepspeed", (2, 2), {"transport": "two_level"}),
    ("s1", (2, 2), {"transport": "two_level"}),
]
CASES += [(schedule, (2, 2), {"tokens": "split"}) for schedule in SCHEDULES]
THREE = {"rows": BucketRows(own=24, node=16, far=8)}
CASES += [(schedule, pair, THREE) for schedule in SCHEDULES if schedule != "ring" for pair in ((1, 1), (2, 2))]
CASES += [("s1", (1, 2), THREE | {"transport": "two_level"})]
PLACE = {"transport": "coordinated"}
CASES += [("s1", pair, PLACE) for pair in ((1, 2), (2, 2), (4, 2))] + [("s2", (2, 2), PLACE | {"gather": "aas"})]
CASES += [("s1", (1, 2), THREE | PLACE)]
CASES += [("s2", (2, 2), THREE | {"gather": "aas"}), ("deepspeed", (2, 2), THREE | {"transport": "two_level"})]
BYTES = {"dispatch_dtype": "float8_e4m3"}
CASES += [
    ("s1", (2, 2), THREE | BYTES),
    ("s2", (2, 2), BYTES),
    ("deduplicated", (2, 2), BYTES),
    ("deepspeed", (2, 2), BYTES | {"transport": "two_level"}),
]
CASES += [("s1", (1, 2), BYTES | PLACE)]


def name_of(case):
    schedule, (mp, esp), options = case
    return "-".join(
        [schedule, f"mp{mp}", f"esp{esp}", *("three" if key == "rows" else str(options[key]) for key in options)]
    )


def lower(config, roles, split=False, plan=None):
    """Return the lowered forward and forward with backward of a layer, of its tokens and passes alone."""
    like = jax.ShapeDtypeStruct((TOKENS // roles.size(roles.dense), DIM), np.float32)
    apply = make_moe(config, roles, like, "gelu", plan, split)
    tables = even_tables(1, EXPERTS, roles.size(roles.expert))

    def body(x, w_gate, bank, grad_sink, tables):
        tables = local(tables)
        grad_sink, _ = open_grad_sink(grad_sink, tables.home_row[0])
        layer = jax.tree.map(lambda array: array[0], tables)
        ids = jnp.arange(TOKENS // roles.size(roles.dense), dtype=jnp.int32)
        y, _, passes = apply(x, w_gate, RouterInputs(None, ids, layer), bank, grad_sink)
        return y, passes

    bank = expert_specs({"w_in": (1, 1, 1), "w_out": (1, 1, 1)}, roles, 0, None)[0]
    rows = P(roles.dense + roles.model if split else roles.dense)
    sharded = jax.shard_map(
        body, mesh=roles.mesh, in_specs=(rows, P(), bank, bank, P(roles.expert)), out_specs=(rows, P())
    )

    def forward(x, w_gate, bank, grad_sink):
        return sharded(x, w_gate, bank, grad_sink, tables)

    def step(x, w_gate, bank, grad_sink, cotangent):
        y, pull, passes = jax.vjp(forward, x, w_gate, bank, grad_sink, has_aux=True)
        return y, passes, pull(cotangent)

    x, w_gate, experts, cotangent = draw(False, np.float32)
    arguments = (x, w_gate, experts, experts)
    return jax.jit(forward).lower(*arguments), jax.jit(step).lower(*arguments, cotangent)


def shape_of(config, roles, split=False, plan=None):
    sizes = layer_sizes(config, roles, TOKENS // roles.size(roles.dense), plan, DIM, 1)  # "bytes" are elements
    groups = choose_groups(roles, config.pairwise_groups) if config.schedule == "pairwise" else 1
    return layer_shape(config.schedule, roles, dataclasses.replace(sizes, split_tokens=split), groups)


def formula(transfers, is_float, roles, inside=1, local=1):
    """Count transfers as the program's are counted: a group is its devices.

    `inside` of them are in one of pairwise's, and `local` of a group in one node under `two_level`.
    """
    axes = {
        "model": roles.model,
        "expert": roles.expert,
        "expert_shard": roles.expert_shard,
        "expert+expert_shard": roles.expert + roles.expert_shard,
        "model_expert": tuple(axis for axis in roles.model if axis in roles.expert),
        "expert_across": tuple(axis for axis in roles.expert if axis not in roles.model),
        "all": roles.all,
    }
    out = collections.Counter()
    for kind, group, elements, calls, item in transfers:
        group, _, level = group.partition(":")
        if kind == "permute":
            devices = ROUNDS
        elif level:
            devices = levels(groups_of(roles, axes[group]), local)[level]
        elif group == "pairwise_group":
            devices = neighbours(groups_of(roles, axes["expert+expert_shard"]), inside)
        elif group == "node":
            near = roles.members_per_node * roles.config.expert_shard
            devices = neighbours(groups_of(roles, axes["expert+expert_shard"]), near)
        elif group == "expert_node":
            devices = neighbours(groups_of(roles, axes["expert"]), roles.members_per_node)
        else:
            devices = groups_of(roles, axes[group])
        out[is_float and not item, kind, devices, elements] += calls
    return out


def neighbours(groups, size):
    """Cut groups of devices into those of `size` neighbours in each."""
    ordered = [sorted(group) for group in groups]
    return frozenset(frozenset(group[i : i + size]) for group in ordered for i in range(0, len(group), size))


def levels(groups, local):
    """Return {'near', 'far'}: groups cut into `local` neighbours each, and into those of equal place in these."""
    tables = [np.array(sorted(group)).reshape(-1, local) for group in groups]
    return {
        "near": frozenset(frozenset(row) for table in tables for row in table.tolist()),
        "far": frozenset(frozenset(row) for table in tables for row in table.T.tolist()),
    }


ALWAYS = {  # together they have every schedule, transport and form of a row, and both ways to bring results back
    "deepspeed-mp1-esp2", "s1-mp2-esp4", "s2-mp4-esp2", "parm-mp2-esp4", "ring-mp4-esp2", "deduplicated-mp2-esp4",
    "pairwise-mp1-esp1-4", "s2-mp4-esp2-aas", "deepspeed-mp2-esp2-two_level", "s1-mp2-esp2-split", "s2-mp2-esp2-split",
    "s1-mp1-esp2-coordinated", "s1-mp2-esp2-three", "pairwise-mp2-esp2-three", "s1-mp1-esp2-three-two_level",
    "s2-mp2-esp2-float8_e4m3",
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if name_of(c) in ALWAYS else pytest.mark.slow) for c in CASES], ids=name_of
)
def test_program_moves_what_the_formula_says(case, monkeypatch):
    schedule, pair, options = case
    options = dict(options)
    split, plan = options.pop("tokens", "") == "split", None
    two_level, three = options.get("transport") == "two_level", options.pop("rows", None)
    nodes = 4 if two_level or three else 0
    roles = build_mesh(MeshConfig(expert_shard=pair[1], model=pair[0], devices_per_node=nodes), jax.devices())
    gather = "aas" if options.get("transport") == "coordinated" else "saa"
    config = moe_config(schedule, **WIDE, **{"gather": gather, **options})
    if three:
        plan = plan_of(roles, three)
        monkeypatch.setattr(LayerSizes, "most_passes", lambda sizes, rows, shared=1: 1)
        monkeypatch.setattr(LayerSizes, "worst_rows", lambda sizes, shared=1: 64)  # none of the three is cut
    shape = shape_of(config, roles, split, plan)
    assert bool(shape.more_own) == bool(three)
    within = (4 // pair[1] if schedule == "deepspeed" else 4) if two_level else 1
    how = {"gather": config.gather, "transport": config.transport}
    forward, backward = layer_transfers(shape, **how)
    lowered = lower(config, roles, split, plan)
    seen_forward, seen_both = (collectives(program, roles, {ROUNDS}) for program in lowered)
    integers = formula(index_transfers(shape, transport=config.transport), False, roles)
    inside = shape.ep_size * shape.esp_size // shape.groups
    assert seen_forward == formula(forward, True, roles, inside, within) + integers
    # gradients of replicated parameters are summed over the devices that hold them: no term of the layer's
    sums = collections.Counter(
        {key: n for key, n in seen_both.items() if key[0] and key[1] == "all_reduce" and key[3] == DIM * EXPERTS}
    )
    assert seen_both - sums == formula(forward + backward, True, roles, inside, within) + integers


def test_a_second_pass_moves_the_same_again():
    """Pass 0 stands in the program once, and the loop over the others once more; the flag and the MP gather do not."""
    roles = roles_of(2, 2)
    config = moe_config("s1", bucket_slack=0.5)
    shape = shape_of(config, roles)
    passes = formula(layer_transfers(shape)[0] * 2, True, roles) + formula(index_transfers(shape) * 2, False, roles)
    whole = formula([Transfer("all_gather", "model", shape.tokens * DIM)], True, roles)
    flag = formula([Transfer("all_reduce", "all", 1)], False, roles)
    # the branch waits for the statistics of the gates of an MP group, which are summed over it
    statistics = formula([Transfer("all_reduce", "model", EXPERTS), Transfer("all_reduce", "model", 1, 2)], True, roles)
    dropped = formula([Transfer("all_reduce", "model", 1)], False, roles)
    assert collectives(lower(config, roles)[0], roles, {}) == passes - whole + flag + statistics + dropped


def test_dp_moves_nothing_forward():
    roles = build_mesh(MeshConfig(data=8, expert=1), jax.devices())
    config = moe_config("dp", **WIDE)
    forward, _ = lower(config, roles)
    shape = shape_of(config, roles)
    assert layer_transfers(shape) == ([], [])
    assert collectives(forward, roles, {}) == formula(index_transfers(shape), False, roles)

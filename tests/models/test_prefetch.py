"""Block-wise schedules compute the reference's loss and gradients, whenever replicas are fetched and dropped.

float64, 1e-10 of the largest reference entry of each leaf. A few cases that together meet every schedule, case, policy,
loop, form of the transfer and kind of mesh run always; a set in which every two values of any two factors meet is slow.
"""

import dataclasses
import re

import jax
import pytest
from support.covering import covering_cases
from support.marks import slow_but
from support.prefetch_cases import check, gradient_step, model_config, placements_of
from support.traced_programs import equations_in, jaxprs_in

from moe_jax.parallel.static_sizes import BucketRows, TransferShape
from moe_jax.planning.hecate import Calibration

FEW = BucketRows(own=16, node=16, far=8)
WIDE = BucketRows.even(1000)  # one pass, which compiles faster
# what Trans and Agg of 'pro_prophet' run next to
PARTS = {"attention": 1.0, "experts": 0.0, "both": 0.5}
NEXT_TO = {name: {"trans_share": part, "agg_share": part} for name, part in PARTS.items()}
CASES = {
    "hecate_again_overflow": {
        "prefetch": "hecate", "refetch_replicas": True, "rows": FEW, "mesh": {"expert": 8, "devices_per_node": 4},
    },
    "split_again_block_data2_halves": {
        "prefetch": "pro_prophet", "refetch_replicas": True, "remat": "block", "mesh": {"expert": 2, "data": 2},
        "zero": 3, "shares": {"trans_share": 0.375, "agg_share": 0.75}, "overlap": "halves", "loss_chunk": 3,
        "rows": WIDE,
    },
    "expert_dots_s1_mp2_esp2_one_hot": {
        "prefetch": "pro_prophet", "shares": NEXT_TO["experts"], "remat": "dots", "schedule": "s1", "by_node": True,
        "routing": "one_hot", "mesh": {"expert": 4, "expert_shard": 2, "model": 2}, "rows": WIDE,
    },
    "halves_s2_sequence_parallel": {
        "prefetch": "none", "schedule": "s2", "sequence_parallel": True, "rows": WIDE, "overlap": "halves",
        "mesh": {"expert": 2, "expert_shard": 2, "model": 2},
    },
    "halves_deduplicated_block_overflow": {
        "prefetch": "hecate", "refetch_replicas": True, "schedule": "deduplicated", "remat": "block", "rows": FEW,
        "mesh": {"expert": 2, "data": 2}, "overlap": "halves",
    },
    "attention_unrolled_again": {
        "prefetch": "pro_prophet", "shares": NEXT_TO["attention"], "refetch_replicas": True, "stack": "unrolled",
        "by_node": True, "routing": "zero", "rows": WIDE,
    },
}  # fmt: skip


# Replicas that come after the gate inside a block-wise schedule, which brings others ahead, as in Hecate: those that
# are planned come next to attention, and calibration adds more once the gate has counted.
def calibrated(shape):
    """Up to two replicas more on a device, by node, at a price that some layers pay."""
    sizes = {"devices": shape.devices, "devices_per_node": shape.devices_per_node, "offers": 2, "slots": 2}
    late = TransferShape(**sizes, by_node=True, crossing=3)
    rule = Calibration(overlap_degree=3, compute=1.0, exchange=0.5, shadow=0.25 * shape.devices)
    return {"late": late, "after_gate": rule, "candidates": shape.devices}


CASES |= {
    "late_hecate": {"prefetch": "hecate", "late": calibrated, "rows": WIDE},
    "late_halves": {"prefetch": "hecate", "overlap": "halves", "mesh": {"expert": 4}, "late": calibrated, "rows": WIDE},
}
ALWAYS = (
    "hecate_again_overflow", "split_again_block_data2_halves", "expert_dots_s1_mp2_esp2_one_hot", "late_halves",
)  # fmt: skip


@pytest.mark.parametrize("name", slow_but(CASES, *ALWAYS))
def test_equals_reference(name):
    passes = check(**CASES[name])
    assert "overflow" not in name or passes > 1, "this case is here to overflow"


FACTORS = {
    "how": (
        ("none", "both"), ("hecate", "both"), ("pro_prophet", "both"), ("pro_prophet", "attention"),
        ("pro_prophet", "experts"),
    ),
    "refetch_replicas": (False, True),
    "remat": ("none", "block", "dots"),
    "stack": ("scan", "unrolled"),
    "by_node": (False, True),
    "layout": (
        ("deepspeed", (("expert", 8),)),
        ("s1", (("expert", 4), ("expert_shard", 2), ("model", 2))),
        ("s2", (("expert", 4), ("expert_shard", 2), ("model", 2))),
        ("deepspeed", (("expert", 4), ("expert_shard", 2), ("model", 2))),
        ("s1", (("expert", 4), ("data", 2))),
    ),
    "rows": (None, FEW),
    "moe_every": (1, 2),
    "routing": ("general", "one_hot", "zero"),
    "overlap": ("none", "halves"),
}  # fmt: skip


def is_valid(case):
    """Without a schedule of transfers nothing is fetched again."""
    return case["how"][0] != "none" or not case["refetch_replicas"]


NEVER = ({"how": ("none", "both"), "refetch_replicas": True},)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", covering_cases(FACTORS, is_valid, NEVER), ids=lambda case: "-".join(str(v) for v in case.values())
)
def test_covering_set_equals_reference(case):
    (prefetch, part), (schedule, mesh) = case["how"], case["layout"]
    names = ("refetch_replicas", "remat", "stack", "by_node", "rows", "moe_every", "routing", "overlap")
    rest = {name: case[name] for name in names}
    layers = 3 * case["moe_every"]
    mesh = dict(mesh)
    if case["overlap"] == "halves":  # two sequences on each device
        mesh["expert"] //= 2
        rest["by_node"] &= mesh["expert"] > 2
    check(prefetch=prefetch, shares=NEXT_TO[part], schedule=schedule, mesh=mesh, layers=layers, **rest)


@pytest.mark.parametrize("prefetch, by_node", [("hecate", True), ("pro_prophet", False)])
def test_what_is_sent_is_packed_before_the_window_opens(prefetch, by_node):
    """What every transfer sends comes out of a fence, next to what the stage computes with: in the program's text, the
    operand of its first exchange is a result of an `optimization_barrier`, whose others nothing of that stage can
    precede. Trans starts with X rows of a slice for each device, Agg with one for each of the m slots."""
    config = model_config(prefetch=prefetch, refetch_replicas=True)
    placements, shape = placements_of(by_node, config.moe_layers, 8)
    offers = 7
    assert offers not in (shape.ahead.slots, shape.ahead.crossing, shape.ahead.offers)
    shape = dataclasses.replace(shape, ahead=dataclasses.replace(shape.ahead, offers=offers))
    with jax.enable_x64(True):
        step, arguments = gradient_step(config, "deepspeed", {"expert": 8}, shape)
        # for GPUs: on a CPU collectives wait for each other by additions behind the fence
        lowered = step.trace(*arguments(placements[0])).lower(lowering_platforms=("cuda",))
        text = lowered.as_text(debug_info=True)
    scopes = dict(re.findall(r'^(#loc\d+) = loc\("([^"]*)"', text, re.MULTILINE))
    first = {"sparse_all_gather": offers, "sparse_reduce_scatter": shape.ahead.slots}
    found = dict.fromkeys(first, 0)
    for function in text.split("func.func"):  # names are a function's own
        fenced = set(re.findall(r"(%\w+)(?::\d+)? = stablehlo.optimization_barrier", function))
        for sent, rows, place in re.findall(
            r'"stablehlo.all_to_all"\((%\w+)(?:#\d+)?\).*?: \(tensor<\d+x(\d+)x\d+x\w+>\).* loc\((#loc\d+)\)', function
        ):
            for scope in first:
                if scope in scopes[place] and int(rows) == first[scope]:
                    assert sent in fenced, scopes[place]
                    found[scope] += 1
    assert all(found.values()), found


def holds_transfer(equation):
    """Return whether an equation is, or holds, an exchange of parameters: those of tokens are in other scopes."""
    return any(
        e.primitive.name == "all_to_all" and "sparse_" in str(e.source_info.name_stack)
        for e in (equation, *equations_in(equation))
    )


@pytest.mark.parametrize("prefetch, attention_share", [("hecate", 1.0), ("pro_prophet", 0.5)])
def test_the_sum_of_dense_gradients_waits_for_the_moves_of_its_window(prefetch, attention_share):
    """In the backward's loop the largest sum over devices is of attention's gradients. Were it free to stand before the
    moves, XLA would put it there, and before it the kernels that it is computed from: nothing would be left next to."""
    config = model_config(prefetch=prefetch, refetch_replicas=True)
    placements, shape = placements_of(False, config.moe_layers, 8)
    with jax.enable_x64(True):
        step, arguments = gradient_step(config, "deepspeed", {"expert": 8}, shape)
        program = step.trace(*arguments(placements[0])).jaxpr
    loops = [
        equation.params["jaxpr"].jaxpr
        for jaxpr in jaxprs_in(program.jaxpr)
        for equation in jaxpr.eqns
        if equation.primitive.name == "scan" and holds_transfer(equation) and equation.params["reverse"]
    ]
    assert len(loops) == 1
    moves, sums, sources = set(), [], {}
    for equation in loops[0].eqns:
        before = frozenset().union(*(sources.get(id(atom), frozenset()) for atom in equation.invars))
        if equation.primitive.name.startswith("psum"):
            sums.append((equation.invars[0].aval.size, before))
        if holds_transfer(equation):
            moves.add(id(equation))
            before |= {id(equation)}
        sources |= {id(out): before for out in equation.outvars}
    in_window = max(sums, key=lambda pair: pair[0])[1]
    assert len(moves) > 2 and len(in_window & moves) == attention_share * len(moves)

"""The reader on schedules that the compiler wrote, against counts taken from the text in another way."""

import functools
import pathlib
import re

import pytest

from moe_jax.inspect import read_text, without_places
from moe_jax.inspection import Model, build_report, parse_module, parse_target, play

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
NAMES = ("expert_parallel", "guests")
LAYERS = 3


@functools.cache
def text_of(name):
    return read_text(str(FIXTURES / f"{name}.hlo.xz"))


@functools.cache
def report_of(text):
    target = parse_target("h200:2x2")
    return build_report(play(parse_module(text), target, Model()), target, Model())


@pytest.fixture(scope="module", params=NAMES)
def text(request):
    return text_of(request.param)


def test_every_start_of_the_text_is_read(text):
    """By regular expression alone: lines that start a collective, and lines that end one."""
    starts = re.findall(r" (?:all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute)-start\(", text)
    dones = re.findall(r" (?:all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute)-done\(", text)
    assert len(starts) == len(dones) > 0
    module = parse_module(text)
    read = [i for c in module.computations.values() for i in c.instructions if i.opcode.endswith("-start")]
    assert len(read) == len(starts)
    lines = sum(" = " in line for line in text.splitlines())
    assert sum(len(c.instructions) for c in module.computations.values()) == lines


def test_layers_run_as_loops(text):
    module = parse_module(text)
    loops = [i for i in module.entry.instructions if i.opcode == "while"]
    assert [loop.trip_count for loop in loops].count(LAYERS) == 2  # forward and backward
    report = report_of(text)
    in_loops = [record for record in report["collectives"] if record["loops"]]
    assert in_loops and all(record["executions"] == LAYERS for record in in_loops)
    assert report["unknown_loops"] == [] and report["unknown_calls"] == {}


def test_tokens_travel_as_often_and_as_far_as_the_schedule_says(text):
    """Dispatch and combine, forward and backward: 4 exchanges a layer of D buckets of C rows of 64 dims, 2 bytes each.

    t = 2 sequences x 64, K = 2, D = 4, slack 1.5: C = 1.5 x 2 x 128 / 4 = 96 rows; guests: the plan's own, larger."""
    report = report_of(text)
    big = [r for r in report["collectives"] if r["role"] == "all-to-all" and r["bytes"] > 1000]
    assert sorted((r["part"], r["scope"].split("/")[-1]) for r in big) == [
        ("backward", "combine"),
        ("backward", "dispatch"),
        ("forward", "combine"),
        ("forward", "dispatch"),
    ]
    (size,) = {r["bytes"] for r in big}
    assert size % (4 * 64 * 2) == 0 and size // (4 * 64 * 2) >= 96
    assert all(r["group_size"] == 4 and r["nodes_of_a_group"] == 2 for r in big)


def test_rows_of_plain_expert_parallelism():
    report = report_of(text_of("expert_parallel"))
    assert {r["bytes"] for r in report["collectives"] if r["role"] == "all-to-all"} == {4 * 96 * 64 * 2, 4 * 2 * 4}
    assert not {"Trans", "Agg"} & {total["role"] for total in report["totals"]["by_role"]}


def test_guests_travel_out_and_back():
    """Each round moves one expert, w_in and w_out of 64 x 128 in bfloat16: out in Trans, its gradient home in Agg."""
    report = report_of(text_of("guests"))
    moved = {role: [r for r in report["collectives"] if r["role"] == role] for role in ("Trans", "Agg")}
    assert len(moved["Trans"]) == len(moved["Agg"]) > 0
    for role, records in moved.items():
        assert {r["kind"] for r in records} == {"collective-permute"}, role
        assert {r["bytes"] for r in records} == {2 * 64 * 128 * 2}, role
        (total,) = [total for total in report["in_loops"]["by_role"] if total["role"] == role]
        assert total["executions"] == LAYERS * len(records)
    assert {r["part"] for r in moved["Trans"]} == {"forward"} and {r["part"] for r in moved["Agg"]} == {"backward"}


def test_matmuls_of_the_step_are_counted(text):
    """At least 3 x 2 x (attention's 4 M^2 and K experts' 2 M F) x tokens x layers and the logits; some run twice."""
    flops = sum(report_of(text)["step"]["flops"].values())
    tokens, dim, hidden, vocabulary = 128, 64, 128, 256
    least = 6 * tokens * (LAYERS * (4 * dim**2 + 2 * 2 * dim * hidden) + dim * vocabulary)
    assert least < flops < 12 * least


def test_the_overflow_branch_is_not_taken():
    branches = report_of(text_of("expert_parallel"))["branches"]
    assert branches and all(min(b["seconds_not_taken"]) >= b["seconds_taken"] for b in branches)
    assert any(b["collectives_not_taken"] > 0 for b in branches)


def test_saved_schedules_name_no_folder():
    text = (
        'HloModule m\n\nFileNames\n1 "/home/someone/x.py"\n\nFunctionNames\n1 "f"\n\nStackFrames\n1 {x}\n\n%c () {\n'
        + (
            '  %a = f32[] add(%b), metadata={op_name="f" source_file="/home/someone/x.py" source_line=3 '
            "stack_frame_id=7}\n}\n"
        )
    )
    assert "someone" not in without_places(text) and 'op_name="f"' in without_places(text)
    for name in NAMES:
        assert "/tmp" not in text_of(name) and ".py" not in text_of(name)

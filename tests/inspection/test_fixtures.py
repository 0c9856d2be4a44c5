"""The reader on schedules that the compiler wrote, against counts taken from the text in another way."""

import functools
import gzip
import pathlib
import re

import pytest

from moe_jax.analysis.compile_ahead import read_text, without_places
from moe_jax.analysis.program_report import build_report
from moe_jax.cluster.costs import cost_of
from moe_jax.cluster.hlo import parse_module
from moe_jax.cluster.targets import parse_target
from moe_jax.cluster.timeline import Model, collective_of, play
from moe_jax.errors import UserError

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
VERSIONS = ("", "-0.11.2", "-0.12.0.1")  # of jax, behind a fixture's name; '' is 0.10.2
PROGRAMS = ("expert_parallel", "replicas")
NAMES = tuple(program + version for program in PROGRAMS for version in VERSIONS)
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
    found = [i for c in module.computations.values() for i in c.instructions if collective_of(i, module)]
    assert sum(i.opcode.endswith("-start") for i in found) == len(starts)
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
    assert sum(report["step"]["flops"].values()) > 1e8
    branches = report["branches"]  # of overflows, not taken
    assert all(min(branch["seconds_not_taken"]) >= branch["seconds_taken"] for branch in branches)
    assert not branches or any(branch["collectives_not_taken"] > 0 for branch in branches)


def test_tokens_travel_as_often_and_as_far_as_the_schedule_says(text):
    """Dispatch and combine, forward and backward: 4 exchanges a layer of D buckets of C rows of 64 dims, 2 bytes each.

    t = 2 sequences x 64, K = 2, D = 4, slack 1.5: C = 1.5 x 2 x 128 / 4 = 96 rows; replicas: the plan's own, larger."""
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


@pytest.mark.parametrize("version", VERSIONS)
def test_replicas_travel_out_and_back(version):
    """Each round moves one expert, w_in and w_out of 64 x 128 in bfloat16: out in Trans, its gradient home in Agg."""
    report = report_of(text_of(f"replicas{version}"))
    moved = {role: [r for r in report["collectives"] if r["role"] == role] for role in ("Trans", "Agg")}
    assert len(moved["Trans"]) == len(moved["Agg"]) > 0
    for role, records in moved.items():
        assert {r["kind"] for r in records} == {"collective-permute"}, role
        assert {r["bytes"] for r in records} == {2 * 64 * 128 * 2}, role
        (total,) = [total for total in report["in_loops"]["by_role"] if total["role"] == role]
        assert total["executions"] == LAYERS * len(records)
    assert {r["part"] for r in moved["Trans"]} == {"forward"} and {r["part"] for r in moved["Agg"]} == {"backward"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_version_moves_the_same_bytes_in_the_same_time(program):
    """However a version writes its starts and groups: exchanges, and what an all-reduce of the gradients adds up."""
    first, *others = (report_of(text_of(program + version)) for version in VERSIONS)
    for role in ("all-to-all", *(("Trans", "Agg") if program == "replicas" else ())):
        (want,) = [total for total in first["totals"]["by_role"] if total["role"] == role]
        for report in others:
            (got,) = [total for total in report["totals"]["by_role"] if total["role"] == role]
            assert (got["executions"], got["bytes"]) == (want["executions"], want["bytes"]), role
            assert got["seconds"] == pytest.approx(want["seconds"], rel=1e-9), role
    summed = [[r for r in report["collectives"] if r["kind"] == "all-reduce"] for report in (first, *others)]
    sizes = [sum(r["bytes"] * r["executions"] for r in records) for records in summed]
    assert max(sizes) < 1.1 * min(sizes), sizes


@pytest.mark.parametrize("name", [name for name in NAMES if "0.1" in name])
def test_copies_on_a_stream_of_their_own_cost_their_slices(name):
    """jax 0.11 and newer: a slice is read and written; the stack that it is cut from, or put into, stays in place."""
    module = parse_module(text_of(name))
    starts = [(i, c) for c in module.computations.values() for i in c.instructions if i.opcode == "fusion-start"]
    assert len(starts) > 10
    for start, computation in starts:
        body = module.computations[start.called()[0]]
        root = body.root
        while root.opcode == "bitcast":
            root = body.by_name[root.operands[0]]
        assert root.opcode in ("dynamic-slice", "dynamic-update-slice"), start.name
        moved = root if root.opcode == "dynamic-slice" else body.by_name[root.operands[1]]
        bytes_ = cost_of(start, computation, module).bytes
        assert 2 * moved.bytes <= bytes_ <= 2 * moved.bytes + 16, start.name  # and an index or two
    stacks = sum(start.bytes for start, _ in starts)
    assert stacks > 2 * sum(cost_of(start, computation, module).bytes for start, computation in starts)


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


def test_a_damaged_archive_is_one_line(tmp_path):
    path = tmp_path / "schedule.hlo.gz"
    packed = bytearray(gzip.compress(b"HloModule x" * 1000))
    packed[20] ^= 0xFF  # inside the stream: zlib's error is no OSError
    path.write_bytes(packed)
    with pytest.raises(UserError, match=r"--hlo \('.*schedule.hlo.gz'\) cannot be read: Error -3"):
        read_text(str(path))

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
NAMES = [program + version for program in PROGRAMS for version in VERSIONS]
LAYERS = 3
KINDS = "all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute"


@functools.cache
def read(name):
    """Return (text, module, report) of a fixture."""
    text, target = read_text(str(FIXTURES / f"{name}.hlo.xz")), parse_target("h200:2x2")
    module = parse_module(text)
    return text, module, build_report(play(module, target, Model()), target, Model())


@pytest.mark.parametrize("name", NAMES)
def test_every_line_is_read_and_layers_run_as_loops(name):
    """By regular expression alone: lines that start a collective, and lines that end one."""
    text, module, report = read(name)
    starts, dones = (len(re.findall(rf" (?:{KINDS})-{end}\(", text)) for end in ("start", "done"))
    instructions = [i for c in module.computations.values() for i in c.instructions]
    found = [i for i in instructions if collective_of(i, module) and i.opcode.endswith("-start")]
    assert len(found) == starts == dones > 0
    assert len(instructions) == sum(" = " in line for line in text.splitlines())
    loops = [i.trip_count for i in module.entry.instructions if i.opcode == "while"]
    assert loops.count(LAYERS) == 2  # forward and backward
    in_loops = [record for record in report["collectives"] if record["loops"]]
    assert in_loops and all(record["executions"] == LAYERS for record in in_loops)
    assert report["unknown_loops"] == [] and report["unknown_calls"] == {}
    assert sum(report["step"]["flops"].values()) > 1e8
    branches = report["branches"]  # of overflows, not taken
    assert all(min(branch["seconds_not_taken"]) >= branch["seconds_taken"] for branch in branches)
    assert not branches or any(branch["collectives_not_taken"] > 0 for branch in branches)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_replicas_travel_as_often_and_as_far_as_the_schedule_says(name):
    """Dispatch and combine, forward and backward: 4 exchanges a layer of D buckets of C rows of 64 dims, 2 bytes each.

    t = 2 sequences x 64, K = 2, D = 4, slack 1.5: C = 1.5 x 2 x 128 / 4 = 96 rows; replicas: the plan's own, larger.
    Each round moves one expert, w_in and w_out of 64 x 128 in bfloat16: out in Trans, its gradient home in Agg."""
    report = read(name)[2]
    moved = {role: [r for r in report["collectives"] if r["role"] == role] for role in ("all-to-all", "Trans", "Agg")}
    big = [r for r in moved.pop("all-to-all") if r["bytes"] > 1000]
    ways = [(part, scope) for part in ("backward", "forward") for scope in ("combine", "dispatch")]
    assert sorted((r["part"], r["scope"].split("/")[-1]) for r in big) == ways
    (size,) = {r["bytes"] for r in big}
    assert size % (4 * 64 * 2) == 0 and size // (4 * 64 * 2) >= 96
    assert all(r["group_size"] == 4 and r["nodes_of_a_group"] == 2 for r in big)
    assert len(moved["Trans"]) == len(moved["Agg"]) and bool(moved["Agg"]) == name.startswith("replicas")
    for role, records in moved.items():
        rounds = {(r["kind"], r["bytes"], r["part"]) for r in records}
        part = "forward" if role == "Trans" else "backward"
        assert rounds <= {("collective-permute", 2 * 64 * 128 * 2, part)}
        totals = [total["executions"] for total in report["in_loops"]["by_role"] if total["role"] == role]
        assert totals == ([LAYERS * len(records)] if records else [])


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_version_moves_the_same_bytes_in_the_same_time(program):
    """However a version writes its starts and groups: exchanges, and what an all-reduce of the gradients adds up."""
    reports = [read(program + version)[2] for version in VERSIONS]
    sums = [
        {own["role"]: (own["executions"], own["bytes"], own["seconds"]) for own in report["totals"]["by_role"]}
        for report in reports
    ]
    for role in ("all-to-all", "Trans", "Agg"):
        assert all(own.get(role, ()) == pytest.approx(sums[0].get(role, ()), rel=1e-9) for own in sums), role
    summed = [[r for r in report["collectives"] if r["kind"] == "all-reduce"] for report in reports]
    sizes = [sum(r["bytes"] * r["executions"] for r in records) for records in summed]
    assert max(sizes) < 1.1 * min(sizes), sizes


@pytest.mark.parametrize("name", [name for name in NAMES if "0.1" in name])
def test_copies_on_a_stream_of_their_own_cost_their_slices(name):
    """jax 0.11 and newer: a slice is read and written; the stack that it is cut from, or put into, stays in place."""
    module = read(name)[1]
    starts = [(i, c) for c in module.computations.values() for i in c.instructions if i.opcode == "fusion-start"]
    assert len(starts) > 10
    for start, computation in starts:
        body = module.computations[start.called()[0]]
        root = body.root
        while root.opcode == "bitcast":
            root = body.by_name[root.operands[0]]
        moved = {"dynamic-slice": root, "dynamic-update-slice": body.by_name.get(root.operands[1])}[root.opcode]
        extra = cost_of(start, computation, module).bytes - 2 * moved.bytes
        assert 0 <= extra <= 16, start.name  # an index or two
    stacks = sum(start.bytes for start, _ in starts)
    assert stacks > 2 * sum(cost_of(start, computation, module).bytes for start, computation in starts)


def test_saved_schedules_name_no_folder():
    line = '%a = f32[] add(%b), metadata={op_name="f" source_file="/home/someone/x.py" source_line=3 stack_frame_id=7}'
    text = f'HloModule m\n\nFileNames\n1 "/home/someone/x.py"\n\nStackFrames\n1 {{x}}\n\n%c () {{\n  {line}\n}}\n'
    assert "someone" not in without_places(text) and 'op_name="f"' in without_places(text)


def test_a_damaged_archive_is_one_line(tmp_path):
    path = tmp_path / "schedule.hlo.gz"
    packed = bytearray(gzip.compress(b"HloModule x" * 1000))
    packed[20] ^= 0xFF  # inside the stream: zlib's error is no OSError
    path.write_bytes(packed)
    with pytest.raises(UserError, match=r"--hlo \('.*schedule.hlo.gz'\) cannot be read: Error -3"):
        read_text(str(path))

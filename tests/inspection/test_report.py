"""The report of a program: its sums, the same program under other assumptions, and what stands in command buffers.

Seconds are those of the toy target; test_timeline.py has the program as it is: 16 s a turn.
"""

import dataclasses
import json
import pathlib

import pytest
from support.toy import BRANCH, LOOP, MODEL, TARGET

from moe_jax.analysis.compile_ahead import stated_buckets
from moe_jax.analysis.program_report import (
    build_report,
    count_thunks,
    draw_timeline,
    overflow_record,
    report_text,
    what_if,
    write_chrome_trace,
)
from moe_jax.cluster.costs import Buckets, exchanged_rows, multiplied_rows
from moe_jax.cluster.hlo import arrays_of, parse_module
from moe_jax.cluster.targets import parse_target
from moe_jax.cluster.timeline import Model, play
from moe_jax.config.gin_files import parse_run_config
from moe_jax.errors import UserError
from moe_jax.parallel.mesh import build_mesh

RUN = pathlib.Path(__file__).parents[2] / "configs/run/gpt_moe_s_h200.gin"
HALF = Buckets(segment="all", by_shape=8, expected=4.0, exchanges=3, overflow=0.01)


def test_report_sums_and_prints(tmp_path):
    slow = dataclasses.replace(TARGET, node_bandwidth=8.0)
    timeline = play(parse_module(LOOP), slow, MODEL)
    report = build_report(timeline, slow, MODEL, memory={"peak": 7}, compile_seconds=1.0, lower_seconds=0.5)
    (total,) = report["totals"]["by_role"]
    assert total["role"] == "all-to-all" and [total] == report["in_loops"]["by_role"]
    (of_scope,) = report["totals"]["by_scope"]
    assert of_scope["scope"] == "forward moe/dispatch" and of_scope["seconds"] == total["seconds"]
    assert total["bytes"] == total["bytes_beside_matmuls"] == 480 and total["executions"] == 3
    assert total["seconds"] == pytest.approx(60.0) and total["exposed_seconds"] == pytest.approx(12.0)
    step = report["step"]  # a matmul in each of three turns
    assert (step["kernels"], step["shortest_kernels"], step["conditionals"]) == (3, 0, 0)
    assert step["modelled_seconds"] == pytest.approx(60.0)
    # one after the other 60 + 48 s of experts; at most the longer of the two is left, and here 48 + 12 are
    alone = {"exchange_seconds": 60.0, "experts_seconds": 48.0, "exposed_seconds": 12.0}
    assert report["pipeline"] == pytest.approx({**alone, "bound": 1.8, "reached": 1.8})
    json.dumps(report)
    text = report_text({**report, "model": dataclasses.asdict(Model(matmul_efficiency=0.6))})
    for said in (
        "3 kernels, 0 of them at the floor",
        "constants of the cost model: matmul_efficiency 0.6 (default 0.7)\n",
        "all-to-all-start",
        "20%",  # 12 of 60 s exposed
        "at most 1.80 times faster (FasterMoE's bound), in this program 1.80",
    ):
        assert said in text, said
    write_chrome_trace(timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    waits = [event for event in events if event["ph"] == "X" and event["tid"] == 3]
    assert [event["dur"] for event in waits] == [pytest.approx(4e6)] * 3
    draw_timeline(timeline, tmp_path / "timeline.png", "two windows")
    assert (tmp_path / "timeline.png").read_bytes()[:4] == b"\x89PNG"


def test_rows_by_shape():
    rows = arrays_of("(bf16[4,2,64], bf16[4,6,64], f32[4,6,1], s32[4,2])")
    assert exchanged_rows(rows) == 8 + 24 and exchanged_rows(arrays_of("s32[4,2]")) == 0
    in_float8 = arrays_of("(u8[32,128,784], s32[32,2], u8[4], u32[])")
    assert exchanged_rows(in_float8) == 4096 and multiplied_rows(in_float8)[0] == 0


def test_expected_rows_shorten_transfers_and_matmuls():
    """Half of the rows: 80 bytes of 160 take 8 s, 512 FLOPs of 1,024 too."""
    module = parse_module(LOOP)
    by_shape = play(module, TARGET, MODEL, (HALF,))
    assert by_shape.seconds == play(module, TARGET, MODEL).seconds == pytest.approx(48.0)
    record = what_if(module, TARGET, MODEL, (HALF,))["rows"]
    assert record["step_seconds"] == pytest.approx(24.0) and record["flops"] == pytest.approx(3 * 512)
    experts, sent = sorted(record["instructions"], key=lambda own: own["bytes"])
    assert (experts["scope"], sent["scope"]) == ("moe/experts", "moe/dispatch")
    assert (experts["rows"], experts["expected_rows"], experts["executions"]) == (3 * 8, 3 * 4, 3)
    assert (sent["rows"], sent["bytes"], sent["expected_bytes"]) == (3 * 4, 480, 240)
    for own in (experts, sent):
        assert own["seconds"] == pytest.approx(48.0) and own["expected_seconds"] == pytest.approx(24.0)


def test_fewer_cores_slow_what_runs_beside_a_transfer():
    """A matmul of 16 s at half the rate does 8 s of it beside a transfer of 16 s, and the rest in 8 s."""
    module = parse_module(LOOP)
    half = play(module, TARGET, MODEL, taken=0.5)
    assert half.seconds == half.compute_seconds == pytest.approx(3 * 24.0)
    assert sum(flight.exposed_seconds for flight in half.flights.values()) == 0
    slow = dataclasses.replace(TARGET, node_bandwidth=4.0)  # 40 s of transfer, beside which the matmul takes 32
    assert play(module, slow, MODEL, taken=0.5).seconds == pytest.approx(3 * 40.0)
    assert what_if(module, TARGET, MODEL) == {"cores": []}  # the toy's cores are not known
    described = dataclasses.replace(TARGET, config="core_count: 64")
    records = what_if(module, described, MODEL, (HALF,))["cores"]
    assert [record["taken"] for record in records] == [0, 16, 32]
    assert [record["step_seconds"] for record in records] == pytest.approx([48.0, 3 * 20.0, 3 * 24.0])
    assert records[2]["expected_rows_step_seconds"] == pytest.approx(3 * 12.0)


def test_an_overflow_costs_the_common_step_and_the_complete_one():
    """The branch that is not taken holds one kernel of 64 bytes at 1,000 bytes/s."""
    common, complete = (play(parse_module(text), TARGET, MODEL) for text in (LOOP, BRANCH))
    record = overflow_record(common, (HALF,), complete)
    assert record["chance"] == pytest.approx(0.03)
    assert record["complete_with_passes_seconds"] == pytest.approx(complete.seconds + 0.064)
    assert record["step_seconds"] == pytest.approx(48.0 + 0.03 * (48.0 + complete.seconds + 0.064))
    assert overflow_record(common, (HALF,), None)["step_seconds"] is None
    planned = dataclasses.replace(HALF, overflow=None)
    assert overflow_record(common, (planned,), complete)["chance"] is None


def test_the_report_says_all_of_it():
    module, target = parse_module(LOOP), dataclasses.replace(TARGET, config="core_count: 132")
    line = play(module, target, MODEL)
    found = what_if(module, target, MODEL, (HALF,))
    found["thunks"] = {"buffers": 2, "inside": {"kernels": 7}, "outside": {"kernels": 3, "conditionals": 0}}
    text = report_text(build_report(line, target, MODEL, overflow=overflow_record(line, (HALF,), line), **found))
    for said in (
        "P(overflow) of a step is at most 3.000%; complete program 48000.000 ms",
        "= 48000.000 ms + 3.000% x (48000.000 ms + 48000.000 ms) = 50880.000 ms",
        "compute at 100 / 132 beside transfers: step ",
        "buckets of all: 8 rows by shape, 4 expected (50.0%), 3 exchanges a step",
        "by expected rows: step 24000.000 ms",
        "2 command buffers with 7 thunks; outside of them 3 kernels, 0 conditionals",
    ):
        assert said in text, said
    unknown = report_text(build_report(line, target, MODEL, overflow=overflow_record(line, (HALF,), None)))
    assert "--complete compiles the complete program" in unknown


def test_buckets_of_the_committed_run():
    """32 buckets of 632 rows for 512 choices each, 12 layers in two halves; and with MP."""
    config = parse_run_config([str(RUN)], [])[0]
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, devices_per_node=8))
    (found,) = stated_buckets(config, build_mesh(config.mesh, 32), None)
    assert (found.by_shape, found.expected, found.exchanges) == (32 * 632, 16384, 24)
    assert 0 < found.overflow <= 0.0004
    # 16 MP groups of 2: under s1 each device fills buckets from its own half of the group's tokens
    in_pairs = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, model=2, expert=32))
    roles = build_mesh(in_pairs.mesh, 32)
    moe = dataclasses.replace(config.moe, overflow_chance=0.0, bucket_slack=1.5)
    by_name = {}
    for name in ("s1", "s2"):
        run = dataclasses.replace(in_pairs, moe=dataclasses.replace(moe, schedule=name))
        (by_name[name],) = stated_buckets(run, roles, None)
    assert (by_name["s1"].by_shape, by_name["s1"].expected) == (32 * 768, 16384)
    assert (by_name["s2"].by_shape, by_name["s2"].expected) == (32 * 1536, 32768)
    dense = dataclasses.replace(config, moe=dataclasses.replace(config.moe, schedule="dp"))
    assert stated_buckets(dense, build_mesh(config.mesh, 32), None) == ()
    assert parse_target("h200:4x8").cores == 132


# a loop of 3 turns around a buffer, a transfer, and a conditional with an inner loop in its longer branch
SEQUENCE = """\
000: kCommandBuffer [source       | next=047 (1)]
    001: kCustomKernel [source       | sink        ] fusion_33 grid: [2, 1, 1] threads: [128, 1, 1]
    002: kCopy         [source       | sink        ] kCopy
003: kWhile         [prev=000 (1) | next=017 (1)]
condition:
    004: kCustomKernel [source | sink] loop_compare_fusion_3 grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    005: kDynamicSliceFusion [source        | next=052 (1) ] params=1, results=1
        006: kCopy [source | sink] kCopy
    000: kCommandBuffer      [prev=052 (1)  | next=062 (2) ]
        007: kCustomKernel [source       | next=056 (2)] fusion_6 grid: [96, 1, 1] threads: [128, 1, 1]
        008: kCuDnn        [source       | next=056 (1)] kCuDnn
        009: kCustomKernel [prev=055 (1) | next=057 (1)] gemm_fusion grid: [768, 1, 1] threads: [64, 1, 1]
    010: kAsyncStart         [prev=165 (1)  | next=083 (1) ] stream=communication_stream[0], async_id=10
        011: kAllToAll [source | sink] kAllToAll
    012: kConditional        [prev=170 (1)  | next=210 (1) ]
      false_branch:
        013: kCopy         [source       | next=174 (3)] kCopy
        014: kWhile        [prev=173 (1) | sink        ]
condition:
            015: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
          body:
            016: kCustomCall   [source | sink] kCustomCall
      true_branch:
        018: kCopy [source | sink] kCopy
    019: kAsyncDone          [prev=083 (1)  | next=233 (1) ] async_id=10
020: kCustomKernel  [prev=003 (1) | sink        ] fusion_9 grid: [1, 1, 1] threads: [32, 1, 1]
"""
METADATA = """\
thunk_metadata {
  thunk_info { profile_annotation: "while.1" thunk_id: 3 }
}
thunk_metadata {
  thunk_info { }
}
"""


def count(folder, sequence, metadata=METADATA):
    (folder / "module_0001.jit_step.thunk_sequence_after_thunk_passes.txt").write_text(sequence)
    (folder / "module_0001.jit_step.thunk_metadata.txt").write_text(metadata)
    return count_thunks(folder, parse_module(LOOP))


def test_every_turn_of_a_loop_counts(tmp_path):
    found = count(tmp_path, SEQUENCE)
    # outside: the loop, in each turn a slice's copy, a transfer, a conditional and its shorter branch; one kernel
    assert found == {
        "buffers": 1 + 3,
        "inside": {"kernels": 1 + 3 * 3, "memory_copies": 1, "collectives": 0, "conditionals": 0, "loops": 0},
        "outside": {"kernels": 1, "memory_copies": 3 * 2, "collectives": 3, "conditionals": 3, "loops": 1},
        "outside_kinds": {"kCopy": 6, "kAllToAll": 3, "kConditional": 3, "kWhile": 1, "kCustomKernel": 1},
    }
    # a loop whose name is not known turns once
    assert count(tmp_path, SEQUENCE, "")["outside"]["collectives"] == 1


def test_a_loop_in_a_command_buffer_is_inside(tmp_path):
    lines = [f"    {line}" if line and line != "condition:" else line for line in SEQUENCE.splitlines()]
    found = count(tmp_path, "\n".join(["000: kCommandBuffer [source | sink]", *lines]))
    assert found["buffers"] == 1 and not any(found["outside"].values())
    assert found["inside"]["loops"] == 1 and found["inside"]["collectives"] == 3


def test_another_text_is_one_line(tmp_path):
    assert count_thunks(tmp_path, parse_module(LOOP)) is None
    with pytest.raises(UserError, match="holds no thunks"):
        count(tmp_path, "nothing")

"""Schedules timed by hand.

On the toy target the block's exchange of 160 bytes takes 16 s, and its matmul of 1,024 bf16 FLOPs at 64 FLOP/s takes
16 s too; a test of a wait makes one of them longer.
"""

import dataclasses
import json

import pytest
from support.toy import HEAD, LOOP, MODEL, TARGET

from moe_jax.analysis.program_report import build_report, draw_timeline, report_text, write_chrome_trace
from moe_jax.cluster.hlo import parse_module
from moe_jax.cluster.timeline import Model, play


def only(timeline):
    (flight,) = timeline.flights.values()
    return flight


def test_a_transfer_as_long_as_its_compute_is_hidden():
    timeline = play(parse_module(LOOP), TARGET, MODEL)
    flight = only(timeline)
    assert timeline.seconds == pytest.approx(48.0) and timeline.compute_seconds == pytest.approx(48.0)
    assert timeline.flops == {"bf16": 3 * 1024.0}
    assert (flight.kind, flight.role, flight.scope, flight.bytes) == ("all-to-all", "all-to-all", "moe/dispatch", 160)
    assert (flight.executions, flight.loops, flight.group_size, flight.nodes_of_a_group) == (3, (3,), 4, 2)
    assert flight.seconds == pytest.approx(48.0) and flight.exposed_seconds == 0.0
    assert flight.executions_beside_matmuls == flight.executions_beside_kernels == 3
    assert flight.beside == {"moe/experts": pytest.approx(48.0)}


def test_a_slow_link_is_waited_for():
    slow = dataclasses.replace(TARGET, node_bandwidth=8.0)  # 20 s a turn, of which 4 are exposed
    timeline = play(parse_module(LOOP), slow, MODEL)
    assert timeline.seconds == pytest.approx(60.0) and only(timeline).exposed_seconds == pytest.approx(12.0)
    waits = [(event.begin, event.end) for event in timeline.events if event.row == "wait"]
    assert waits == [pytest.approx((16.0, 20.0)), pytest.approx((36.0, 40.0)), pytest.approx((56.0, 60.0))]


def test_a_transfer_that_ends_before_the_matmul_begins_is_exposed_whole():
    lines = LOOP.splitlines()
    dot = next(line for line in lines if line.startswith("  %dot.1"))
    done = next(line for line in lines if line.startswith("  %all-to-all-done"))
    lines.remove(dot)
    lines.insert(lines.index(done) + 1, dot)
    flight = only(play(parse_module("\n".join(lines)), TARGET, MODEL))
    assert flight.exposed_seconds == flight.seconds == pytest.approx(48.0)
    assert flight.executions_beside_matmuls == flight.executions_beside_kernels == 0 and flight.beside == {}


def test_synchronous_collectives_are_exposed_whole():
    text = LOOP.replace("all-to-all-start(%x)", "all-to-all(%x)").replace(
        "((f32[4,10]{1,0}), f32[4,10]{1,0}) all", "f32[4,10]{1,0} all"
    )
    text = text.replace("  %all-to-all-done = f32[4,10]{1,0} all-to-all-done(%all-to-all-start)\n", "")
    text = text.replace("tuple(%i, %all-to-all-done)", "tuple(%i, %all-to-all-start)")
    flight = only(play(parse_module(text), TARGET, MODEL))
    assert not flight.asynchronous and flight.exposed_seconds == pytest.approx(48.0) and flight.bytes == 160


def test_unknown_trip_counts_run_once_and_are_named():
    text = LOOP.replace('"known_trip_count":{"n":"3"},', "")
    timeline = play(parse_module(text), TARGET, MODEL)
    assert only(timeline).executions == 1 and timeline.unknown_loops == {"while.1"}


TWO = (
    HEAD
    + """
ENTRY %main (x: f32[40]) -> f32[160] {
  %x = f32[40]{0} parameter(0)
  %a = bf16[8,8]{1,0} constant({...})
  %ags = (f32[40]{0}, f32[80]{0}) all-gather-start(%x), replica_groups={{0,1},{2,3}}, dimensions={0}
  %cps = (f32[40]{0}, f32[40]{0}) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %agd = f32[80]{0} all-gather-done(%ags)
  %ars = f32[40]{0} all-reduce-start(%x), replica_groups={{0,2},{1,3}}, to_apply=%sum
  %cpd = f32[40]{0} collective-permute-done(%cps)
  %dot.9 = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %ard = f32[40]{0} all-reduce-done(%ars)
}
"""
)


def test_transfers_share_links_one_after_the_other():
    """All-gather of 320 bytes inside nodes: 1.6 s. The permute of 160 waits for it, ends at 3.2. The all-reduce crosses
    nodes, one device of each: 2 groups of 2 x 80 bytes leave a node: 32 s; begun at 1.6 it ends at 33.6. It uses no
    link inside. The matmul runs from 3.2 to 19.2."""
    flights = play(parse_module(TWO), TARGET, MODEL).flights
    gather, permute, reduce = flights["ags"], flights["cps"], flights["ars"]
    assert gather.bytes == 320 and gather.exposed_seconds == pytest.approx(1.6)
    assert permute.waited_for_links_seconds == pytest.approx(1.6) and permute.exposed_seconds == pytest.approx(1.6)
    assert reduce.bytes == 160 and reduce.bytes_leaving_a_node == 320
    assert reduce.exposed_seconds == pytest.approx(33.6 - 19.2) and reduce.executions_beside_matmuls == 1


WRAPPED = (
    HEAD
    + """
%wrapped (w: f32[4,10]) -> f32[4,10] {
  %w = f32[4,10]{1,0} parameter(0)
  ROOT %inner = f32[4,10]{1,0} all-to-all(%w), replica_groups={{0,1},{2,3}}, dimensions={0}, METADATA
}

%busy (v: bf16[8,8]) -> f32[8,8] {
  %v = bf16[8,8]{1,0} parameter(0)
  ROOT %dot.2 = f32[8,8]{1,0} dot(%v, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%idle (u: bf16[8,8]) -> f32[8,8] {
  %u = bf16[8,8]{1,0} parameter(0)
  ROOT %none = f32[8,8]{1,0} constant({...})
}

ENTRY %main (x: f32[4,10], p: pred[], a: bf16[8,8]) -> f32[4,10] {
  %x = f32[4,10]{1,0} parameter(0)
  %p = pred[] parameter(1)
  %a = bf16[8,8]{1,0} parameter(2)
  %s = ((f32[4,10]{1,0}), f32[4,10]{1,0}, u32[]) async-start(%x), calls=%wrapped
  %call.1 = f32[8,8]{1,0} call(%a), to_apply=%busy
  %conditional.1 = f32[8,8]{1,0} conditional(%p, %a, %a), true_computation=%busy, false_computation=%idle
  ROOT %d = f32[4,10]{1,0} async-done(%s)
}
""".replace("METADATA", 'metadata={op_name="jit(f)/combine/all_to_all"}')
)


def test_wrapped_collectives_calls_and_branches():
    """80 of 160 bytes to the neighbour: 0.8 s beside a called matmul of 16 s; the branch that computes is not taken."""
    timeline = play(parse_module(WRAPPED), TARGET, MODEL)
    flight = only(timeline)
    assert (flight.kind, flight.role, flight.bytes) == ("all-to-all", "all-to-all", 160)
    assert (
        flight.seconds == pytest.approx(0.8) and flight.exposed_seconds == 0 and flight.executions_beside_matmuls == 1
    )
    assert timeline.seconds == pytest.approx(16.0)
    branch = timeline.skipped["conditional.1"]
    assert branch["seconds_not_taken"] == [pytest.approx(16.0)] and branch["executions"] == 1


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
    assert "3 kernels, 0 of them at the floor" in report_text(report)
    assert report["step"]["modelled_seconds"] == pytest.approx(60.0)
    # one after the other 60 + 48 s of experts; at most the longer of the two is left, and here 48 + 12 are
    alone = {"exchange_seconds": 60.0, "experts_seconds": 48.0, "exposed_seconds": 12.0}
    assert report["pipeline"] == pytest.approx({**alone, "bound": 1.8, "reached": 1.8})
    json.dumps(report)
    text = report_text(report)
    assert "constants of the cost model" not in report_text({**report, "model": dataclasses.asdict(Model())})
    fitted = report_text({**report, "model": dataclasses.asdict(Model(matmul_efficiency=0.6))})
    assert "constants of the cost model: matmul_efficiency 0.6 (default 0.7)\n" in fitted
    assert "all-to-all-start" in text and "20%" in text  # 12 of 60 s exposed
    assert "at most 1.80 times faster (FasterMoE's bound), in this program 1.80" in text
    write_chrome_trace(timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    waits = [event for event in events if event["ph"] == "X" and event["tid"] == 3]
    assert [event["dur"] for event in waits] == [pytest.approx(4e6)] * 3
    draw_timeline(timeline, tmp_path / "timeline.png", "two windows")
    assert (tmp_path / "timeline.png").read_bytes()[:4] == b"\x89PNG"

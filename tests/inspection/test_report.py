"""The report of a program: its sums, the same program under other assumptions, and what a trace measured.

Seconds are those of the toy target; test_timeline.py has the program as it is: 16 s a turn.
"""

import dataclasses
import json
import lzma
import pathlib

import pytest
from support.gpu_trace import write_gpu_trace
from support.toy import BRANCH, LOOP, PRICES, TARGET

from moe_jax.analysis.measured import add_measured, compare_instructions, read_spans
from moe_jax.analysis.program_report import (
    build_report,
    overflow_record,
    report_text,
    write_chrome_trace,
)
from moe_jax.cluster.costs import Buckets
from moe_jax.cluster.hlo import parse_module
from moe_jax.cluster.prices import Prices
from moe_jax.cluster.targets import parse_target
from moe_jax.cluster.timeline import play

HALF = Buckets(segment="all", by_shape=8, expected=4.0, exchanges=3, overflow=0.01)


def test_report_sums_and_prints(tmp_path):
    slow = dataclasses.replace(TARGET, node_bandwidth=8.0)
    timeline = play(parse_module(LOOP), dataclasses.replace(PRICES, target=slow))
    facts = {"memory": {"peak": 7}, "compile_seconds": 1.0, "lower_seconds": 0.5}
    report = build_report(timeline, dataclasses.replace(PRICES, target=slow), facts)
    (total,) = report["totals"]["by_role"]
    assert total["role"] == "all-to-all" and [total] == report["in_loops"]["by_role"]
    (of_scope,) = report["totals"]["by_scope"]
    assert of_scope["scope"] == "forward moe/dispatch" and of_scope["seconds"] == total["seconds"]
    assert total["bytes"] == total["bytes_overlapping_matmuls"] == 480 and total["executions"] == 3
    assert total["seconds"] == pytest.approx(60.0) and total["exposed_seconds"] == pytest.approx(12.0)
    step = report["step"]  # a matmul in each of three turns
    assert (step["kernels"], step["shortest_kernels"], step["conditionals"]) == (3, 0, 0)
    assert step["modelled_seconds"] == pytest.approx(60.0)
    # one after the other 60 + 48 s of experts; at most the longer of the two is left, and here 48 + 12 are
    alone = {"exchange_seconds": 60.0, "experts_seconds": 48.0, "exposed_seconds": 12.0}
    assert report["pipeline"] == pytest.approx({**alone, "bound": 1.8, "reached": 1.8})
    # each turn's matmul of 16 s runs in the 20 s of its exchange
    assert [own["overlapped_seconds"] for own in report["compute_by_scope"]] == pytest.approx([48.0])
    json.dumps(report)
    text = report_text({**report, "model": {**report["model"], "matmul_efficiency": 0.6}})
    for said in (
        "3 kernels, 0 of them at the floor",
        "constants of the cost model: matmul_efficiency 0.6, ",
        "all-to-all-start",
        "compute overlapped with an exchange of tokens: forward moe/experts 100%\n",
        "20%",  # 12 of 60 s exposed
        "at most 1.80 times faster (FasterMoE's bound), in this program 1.80",
    ):
        assert said in text, said
    write_chrome_trace(timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    waits = [event for event in events if event["ph"] == "X" and event["tid"] == 3]
    assert [event["dur"] for event in waits] == [pytest.approx(4e6)] * 3


def test_an_overflow_costs_the_common_step_and_the_complete_one():
    """The branch that is not taken holds one kernel of 64 bytes at 1,000 bytes/s."""
    common, complete = (play(parse_module(text), PRICES) for text in (LOOP, BRANCH))
    record = overflow_record(common, (HALF,), complete)
    assert record["chance"] == pytest.approx(0.03)
    assert record["complete_with_passes_seconds"] == pytest.approx(complete.seconds + 0.064)
    assert record["step_seconds"] == pytest.approx(48.0 + 0.03 * (48.0 + complete.seconds + 0.064))
    assert overflow_record(common, (HALF,), None)["step_seconds"] is None
    planned = dataclasses.replace(HALF, overflow=None)
    assert overflow_record(common, (planned,), complete)["chance"] is None


FIXTURES = pathlib.Path(__file__).parent / "fixtures"
H200 = parse_target("h200:2x2")
REAL = Prices(H200, matmul_efficiency=0.5, memory_efficiency=0.6, launch=4e-6)


def test_a_trace_of_the_model_itself_has_ratio_one(tmp_path):
    """As a device with the constants `REAL` runs it; modelled with the defaults, the trace says what these are."""
    program = parse_module(lzma.decompress((FIXTURES / "expert_parallel.hlo.xz").read_bytes()).decode())
    write_gpu_trace(tmp_path, program, REAL, steps=2)
    spans = read_spans(tmp_path, program.name)
    record = compare_instructions(program, REAL, spans, 2, step_seconds=1.0)
    assert {group["group"] for group in record["groups"]} >= {"matmul", "fusion", "collective"}
    for row in [*record["groups"], *record["worst"]]:
        assert row["ratio"] == pytest.approx(1, rel=1e-6), row
    assert record["not_in_trace"]["instructions"] == record["not_in_program"]["instructions"] == 0
    assert record["devices"] == 1 and record["busy_seconds"] <= record["profiled_step_seconds"] * 1.001

    report = build_report(play(program, Prices(H200)), Prices(H200), {})
    report = add_measured(report, program, Prices(H200), spans, 2, 1.0)
    assert report["constants"] == report["instructions"]["constants"] == pytest.approx({"launch": REAL.launch})
    text = report_text(report)
    assert "instructions that differ most" in text and "launch 2.4e-06 -> 4e-06" in text
    json.dumps(report)


def test_compare_by_hand():
    """The toy's loop: 3 turns of a matmul of 1,024 FLOPs at 64 FLOP/s, 16 s, and 160 bytes on the links. Two steps on
    one device measure 20 s a turn: ratio 1.25. A kernel that the program lacks is listed apart."""
    module = parse_module(LOOP)
    spans = []
    for turn in range(6):
        spans.append(("dot.1", 30.0 * turn, 30.0 * turn + 20))
        spans.append(("all-to-all-start", 30.0 * turn, 30.0 * turn + 25))
    spans.append(("stranger", 200.0, 202.0))
    record = compare_instructions(module, PRICES, {"gpu": spans}, steps=2, step_seconds=100.0)
    matmul = next(group for group in record["groups"] if group["group"] == "matmul")
    assert matmul == {
        "group": "matmul", "instructions": 1, "executions": 3, "modelled_seconds": 48.0, "measured_seconds": 60.0,
        "ratio": 1.25,
    }  # fmt: skip
    assert record["not_in_program"] == {"instructions": 1, "measured_seconds": 1.0, "names": ["stranger"]}
    assert record["launches"] == 3 and record["busy_seconds"] == (6 * 25 + 2) / 2
    assert record["profiled_step_seconds"] == 101.0 and record["constants"] == {}


def test_collectives_measured_by_hand():
    """Two devices, two steps. On d0 a transfer runs 0-4 and 10-14; kernels 1-2 and 1.5-3, then 12-20: hidden are
    2 s and 2 s, exposed 4 s. On d1 nothing computes next to 2 s of transfer. Per device and step: 10 / 4 s, exposed
    6 / 4 s."""
    module = parse_module(LOOP)
    report = build_report(play(module, PRICES), PRICES, {})
    transfer, other = "all-to-all-start", ("all-to-all", 5, 7)  # started and done, or a kernel
    ran = [(transfer, 0, 4), ("dot.1", 1, 2), ("fusion.7", 1.5, 3), (transfer, 10, 14), ("dot.1", 12, 20)]
    found = add_measured(report, module, PRICES, {"d0": ran, "d1": [other, ("dot.1", 7, 8)]}, steps=2)
    times = {"step_seconds": 10.0, "compute_seconds": 11 / 4, "collective_seconds": 10 / 4, "exposed_seconds": 6 / 4}
    assert found["measured"] == {"steps": 2, "devices": 2, **times}
    (record,) = found["collectives"]
    assert record["measured"] == {"executions": 3 / 4, "seconds": 10 / 4, "exposed_seconds": 6 / 4}
    assert "2500.000" in report_text(found)
    lacking = add_measured(report, module, PRICES, {"d0": [("dot.1", 0, 1)]}, steps=1)
    assert lacking["collectives"][0]["measured"] is None and "not in the trace" in report_text(lacking)

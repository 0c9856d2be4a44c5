"""Measured beside modelled seconds, by instruction: constants are recovered from a device that has known ones."""

import dataclasses
import json
import lzma
import pathlib
import random

import pytest
from support.gpu_trace import write_gpu_trace
from support.toy import BRANCH, LOOP, MODEL, TARGET

from moe_jax.analysis.measured import Span, add_measured, compare_instructions, fit_constants, read_spans
from moe_jax.analysis.program_report import build_report, report_text
from moe_jax.cluster.hlo import parse_module
from moe_jax.cluster.targets import parse_target
from moe_jax.cluster.timeline import Model, play

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
H200 = parse_target("h200:2x2")
REAL = Model(matmul_efficiency=0.5, memory_efficiency=0.6, launch=4e-6)


@pytest.fixture(scope="module")
def program():
    return parse_module(lzma.decompress((FIXTURES / "expert_parallel.hlo.xz").read_bytes()).decode())


def compare(folder, program, model, steps=2):
    write_gpu_trace(folder, program, H200, REAL, steps)
    return compare_instructions(program, H200, model, read_spans(folder, program.name), steps, step_seconds=1.0)


def test_a_trace_of_the_model_itself_has_ratio_one(tmp_path, program):
    record = compare(tmp_path, program, REAL)
    assert {group["group"] for group in record["groups"]} >= {"matmul", "fusion", "collective"}
    for row in [*record["groups"], *record["worst"]]:
        assert row["ratio"] == pytest.approx(1, rel=1e-6), row
    assert record["not_in_trace"]["instructions"] == record["not_in_program"]["instructions"] == 0
    assert record["devices"] == 1 and record["busy_seconds"] <= record["profiled_step_seconds"] * 1.001


def test_constants_of_the_device_are_found(tmp_path, program):
    """Modelled with the defaults, the trace says what the device's own constants are."""
    record = compare(tmp_path, program, Model())
    assert record["constants"]["launch"] == pytest.approx(REAL.launch, rel=1e-6)
    for name in ("matmul_efficiency", "memory_efficiency"):
        if record["fit"][name]["samples"] >= 3:
            assert record["constants"][name] == pytest.approx(getattr(REAL, name), rel=1e-6)
    report = build_report(play(program, H200, Model()), H200, Model())
    report = add_measured(report, program, H200, Model(), read_spans(tmp_path, program.name), 2, 1.0)
    assert report["instructions"] == record and report["constants"] == record["constants"]
    text = report_text(report)
    assert "instructions that differ most" in text and "launch 2e-06 -> 4e-06" in text
    json.dumps(record)


def test_compare_by_hand():
    """The toy's loop: 3 turns of a matmul of 1,024 FLOPs at 64 FLOP/s, 16 s, and 160 bytes on the links. Two steps on
    one device measure 20 s a turn: ratio 1.25. A kernel that the program lacks is listed apart."""
    module = parse_module(LOOP)
    spans = []
    for turn in range(6):
        spans.append(Span("gpu", "dot.1", 30.0 * turn, 30.0 * turn + 20))
        spans.append(Span("gpu", "all-to-all-start", 30.0 * turn, 30.0 * turn + 25))
    spans.append(Span("gpu", "stranger", 200.0, 202.0))
    record = compare_instructions(module, TARGET, MODEL, spans, steps=2, step_seconds=100.0)
    matmul = next(group for group in record["groups"] if group["group"] == "matmul")
    assert matmul == {
        "group": "matmul", "instructions": 1, "executions": 3, "modelled_seconds": 48.0, "measured_seconds": 60.0,
        "ratio": 1.25,
    }  # fmt: skip
    assert record["not_in_program"] == {"instructions": 1, "measured_seconds": 1.0, "names": ["stranger"]}
    assert record["launches"] == 3 and record["busy_seconds"] == (6 * 25 + 2) / 2
    assert record["idle_seconds_per_launch"] == pytest.approx((100 - 76) / 3)
    assert record["profiled_step_seconds"] == 101.0 and record["constants"] == {}
    assert record["fit"]["conditional"] == {"value": None, "before": 0.0, "samples": 0, "quartiles": None}


def test_pauses_around_conditionals_are_their_cost():
    """Kernels end at 1, 11, 21, 31 ms; the predicate is read; the next kernels begin 0.5 ms after the last one's end:
    the conditional costs that, less one launch."""
    module = parse_module(BRANCH)
    spans = []
    for place in range(4):
        start = 0.01 * place
        spans.append(Span("gpu", "before", start, start + 1e-3))
        spans.append(Span("gpu", "conditional.1", start + 1.1e-3, start + 1.2e-3))
        spans.append(Span("gpu", "after", start + 1.5e-3, start + 2e-3))
    record = compare_instructions(module, H200, Model(), spans, steps=4)
    assert record["constants"]["conditional"] == pytest.approx(0.5e-3 - 2e-6)
    loops = next(group for group in record["groups"] if group["group"] == "loop overhead")
    assert loops["measured_seconds"] == pytest.approx(1e-4) and record["step_seconds"] is None


def test_collectives_measured_by_hand():
    """Two devices, two steps. On d0 a transfer runs 0-4 and 10-14; kernels 1-2 and 1.5-3, then 12-20: hidden are
    2 s and 2 s, exposed 4 s. On d1 nothing computes beside 2 s of transfer. Per device and step: 10 / 4 s, exposed
    6 / 4 s."""
    module = parse_module(LOOP)
    report = build_report(play(module, TARGET, MODEL), TARGET, MODEL)
    transfer, other = "all-to-all-start", ("all-to-all", 5, 7)  # started and done, or a kernel
    ran = [(transfer, 0, 4), ("dot.1", 1, 2), ("fusion.7", 1.5, 3), (transfer, 10, 14), ("dot.1", 12, 20)]
    spans = [Span("d0", *own) for own in ran] + [Span("d1", *own) for own in (other, ("dot.1", 7, 8))]
    found = add_measured(report, module, TARGET, MODEL, spans, steps=2)
    times = {"step_seconds": 10.0, "compute_seconds": 11 / 4, "collective_seconds": 10 / 4, "exposed_seconds": 6 / 4}
    assert found["measured"] == {"steps": 2, "devices": 2, **times}
    (record,) = found["collectives"]
    assert record["measured"] == {"executions": 3 / 4, "seconds": 10 / 4, "exposed_seconds": 6 / 4}
    assert "2500.000" in report_text(found)
    lacking = add_measured(report, module, TARGET, MODEL, [Span("d0", "dot.1", 0, 1)], steps=1)
    assert lacking["collectives"][0]["measured"] is None and "not in the trace" in report_text(lacking)


def samples_of(model):
    """Kernels as a device with these constants runs them, and some that are ten times slower for no reason."""
    rng = random.Random(0)
    found = []
    for place in range(60):
        matmul = rng.uniform(1e-4, 1e-3) if place % 3 == 0 else 0.0
        memory = {0: 1e-5, 1: rng.uniform(3e-5, 3e-4), 2: 1e-8}[place % 3]
        took = max(matmul / model.matmul_efficiency, memory / model.memory_efficiency, model.launch)
        slow = 10 if place in (1, 2) else 1
        found.append((matmul, memory, took * slow, 1 + place % 4))
    return found


def test_fit_finds_the_constants_of_a_device():
    real = Model(matmul_efficiency=0.55, memory_efficiency=0.9, launch=3.5e-6, conditional=2e-5)
    fit = fit_constants(samples_of(real), Model(), pauses=[2e-5 + 2e-6] * 5)
    assert {name: own["value"] for name, own in fit.items()} == pytest.approx(dataclasses.asdict(real))
    assert fit["launch"]["before"] == Model().launch and fit["launch"]["samples"] == 20

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from support.toy import LOOP, MODEL, TARGET

from moe_jax.analysis.instructions import read_spans
from moe_jax.analysis.program_report import Span, add_measured, build_report, measured_text
from moe_jax.cluster.hlo import parse_module
from moe_jax.cluster.timeline import play
from moe_jax.errors import UserError


def report_of_loop():
    return build_report(play(parse_module(LOOP), TARGET, MODEL), TARGET, MODEL)


def test_add_measured_by_hand():
    """Two devices, two steps. On d0 a transfer runs 0-4 and 10-14; kernels 1-2 and 1.5-3, then 12-20: hidden are
    2 s and 2 s, exposed 4 s. On d1 nothing computes beside 2 s of transfer. Per device and step: 10 / 4 s, exposed
    6 / 4 s."""
    spans = [
        Span("d0", "all-to-all-start", 0, 4),
        Span("d0", "dot.1", 1, 2),
        Span("d0", "fusion.7", 1.5, 3),
        Span("d0", "all-to-all-start", 10, 14),
        Span("d0", "dot.1", 12, 20),
        Span("d1", "all-to-all", 5, 7),
        Span("d1", "dot.1", 7, 8),
    ]
    report = add_measured(report_of_loop(), spans, steps=2)
    assert report["measured"] == {
        "steps": 2,
        "devices": 2,
        "step_seconds": 10.0,
        "compute_seconds": (2 + 8 + 1) / 4,
        "collective_seconds": 10 / 4,
        "exposed_seconds": 6 / 4,
    }
    (record,) = report["collectives"]
    assert record["measured"] == {"executions": 3 / 4, "seconds": 10 / 4, "exposed_seconds": 6 / 4}
    assert "2500.000" in measured_text(report)


def test_what_the_trace_lacks_is_said():
    report = add_measured(report_of_loop(), [Span("d0", "dot.1", 0, 1)], steps=1)
    assert report["collectives"][0]["measured"] is None and "not in the trace" in measured_text(report)


def test_read_spans_of_a_recorded_trace(tmp_path):
    """A trace recorded here, on CPU devices: its instructions are those of the compiled text."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def traced_step(a):
        body = lambda part: jax.lax.psum(jnp.tanh(part @ part.T), "x")  # noqa: E731
        return jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P())(a)

    a = jax.device_put(jnp.ones((128, 64)), jax.NamedSharding(mesh, P("x")))
    compiled = jax.jit(traced_step).lower(a).compile()
    compiled(a).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(2):
            compiled(a).block_until_ready()
    module = parse_module(compiled.as_text())
    spans = read_spans(tmp_path, module.name)
    assert len({span.device for span in spans}) == 4
    assert {span.instruction for span in spans} <= set(module.entry.by_name) | {"thunk"}
    reduces = [span for span in spans if span.instruction.startswith("psum") or "all-reduce" in span.instruction]
    assert len(reduces) == 2 * 4 and all(span.end > span.begin for span in reduces)
    with pytest.raises(UserError, match="no execution of another"):
        read_spans(tmp_path, "another")
    with pytest.raises(UserError, match="holds no trace"):
        read_spans(tmp_path / "nowhere", module.name)

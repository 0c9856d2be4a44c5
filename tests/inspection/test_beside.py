"""Seconds of experts that have an exchange in flight, on the toy schedule that test_timeline.py times by hand."""

from support.toy import LOOP, MODEL, TARGET

from moe_jax.analysis.program_report import beside_text
from moe_jax.cluster.hlo import parse_module
from moe_jax.cluster.timeline import play


def test_experts_beside_rows_of_a_loop_of_three_turns():
    """Each turn's exchange of 16 s has the experts' matmul of 16 s beside it; nothing is gathered."""
    assert beside_text(play(parse_module(LOOP), TARGET, MODEL)) == (
        "experts 48000.00 ms, 48000.00 beside rows; gathers 0.00 ms, 0.00 beside rows; rows 48000.00 ms; "
        "step 48000.00 ms"
    )

"""Seconds of experts that have an exchange in flight, on the toy schedule that test_timeline.py times by hand."""

from support.toy import LOOP, MODEL, TARGET

from moe_jax.inspection import parse_module, play
from moe_jax.inspection.beside import beside_text, seconds, shared


def test_spans_are_counted_once():
    assert seconds([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == 4.0
    assert shared([(0.0, 2.0), (4.0, 5.0)], [(1.0, 4.5)]) == 1.5


def test_experts_beside_rows_of_a_loop_of_three_turns():
    """Each turn's exchange of 16 s has the experts' matmul of 16 s beside it; nothing is gathered."""
    assert beside_text(play(parse_module(LOOP), TARGET, MODEL)) == (
        "experts 48000.00 ms, 48000.00 beside rows; gathers 0.00 ms, 0.00 beside rows; rows 48000.00 ms; "
        "step 48000.00 ms"
    )

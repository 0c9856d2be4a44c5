"""Block-wise schedules as data: what Hecate 3.2 and Pro-Prophet V-B say, by hand, and rules that all schedules keep."""

import itertools

import numpy as np
import pytest

from moe_jax.planning.block_schedule import (
    SCHEDULES,
    STAGES,
    Prefetch,
    Times,
    exposed,
    shares,
    stage_seconds,
)

EVERY = [
    Prefetch(schedule=name, refetch_replicas=again, halves=halves)
    for name, again, halves in itertools.product(SCHEDULES, (False, True), (False, True))
    if name != "none" or (halves and not again)
]


def written(schedule):
    """Return the step as words: 'A0|T0' is attention of layer 0 with Trans of layer 0; a prime marks the way back."""
    letters, words = {name: letter for letter, name in STAGES.items()}, []
    for direction, pair in schedule.windows():
        sides = []
        for window in pair.pair:
            name, again, _ = window.stage.partition("_again")
            word = letters[name] + ("'" if direction == "backward" and not again else "")
            word += ("" if window.half is None else "ab"[window.half]) + str(window.layer)
            for move in window.moves:
                part = "" if (move.start, move.stop) == (0, 1) else f"[{move.start:g},{move.stop:g}]"
                word += f"|{'T' if move.kind == 'trans' else 'G'}{move.layer}{part}"
            sides.append(word)
        words.append(sides[0] + ("+" if sides[1:] else "") + ",".join(sides[1:]))
    return " ".join(words)


def test_hecate_by_hand():
    schedule = Prefetch(schedule="hecate", refetch_replicas=True).build(3)
    assert written(schedule) == (
        "A0|T0 D0 E0 C0 A1|T1 D1 E1 C1 A2|T2 D2 E2 C2 C'2 E'2 D'2 A'2|G2|T1 C'1 E'1 D'1 A'1|G1|T0 C'0 E'0 D'0 A'0|G0"
    )
    assert "T" not in written(Prefetch(schedule="hecate").build(3)).split("C'2")[1]
    for name, again, layers in (("hecate", True, 1), ("pro_prophet", True, 2), ("hecate", False, 6)):
        assert Prefetch(schedule=name, refetch_replicas=again).build(6).layers_alive() == layers


def test_pro_prophet_by_hand():
    """SubTrans1 with the experts, SubTrans2 with the next attention; SubAgg1 with attention, SubAgg2 after it."""
    schedule = Prefetch(schedule="pro_prophet").build(3, trans_share=0.75, agg_share=0.25)
    assert written(schedule) == (
        "A0|T0 D0 E0|T1[0,0.25] C0 A1|T1[0.25,1] D1 E1|T2[0,0.25] C1 A2|T2[0.25,1] D2 E2 C2 "
        "C'2 E'2 D'2 A'2|G2[0,0.25] C'1 E'1|G2[0.25,1] D'1 A'1|G1[0,0.25] C'0 E'0|G1[0.25,1] D'0 A'0|G0"
    )
    again = Prefetch(schedule="pro_prophet", refetch_replicas=True).build(3, trans_share=0.75, agg_share=0.25)
    assert written(again).split("C2 ", 1)[1] == (
        "C'2 E'2|T1[0,0.25] D'2 A'2|G2[0,0.25]|T1[0.25,1] C'1 E'1|G2[0.25,1]|T0[0,0.25] D'1 "
        "A'1|G1[0,0.25]|T0[0.25,1] C'0 E'0|G1[0.25,1] D'0 A'0|G0"
    )


def test_halves_by_hand():
    """What travels of one half stands before what computes of the other."""
    schedule = Prefetch(halves=True, schedule="hecate", refetch_replicas=True).build(2)
    assert written(schedule) == (
        "Aa0|T0 Ga0 Sa0+Ab0,Gb0 Sb0+Ea0 Ba0+Eb0 Bb0+Ua0,Aa1|T1,Ga1 Sa1+Ub0,Ab1,Gb1 Sb1+Ea1 Ba1+Eb1 Bb1+Ua1 Ub1 "
        "U'b1 B'b1 U'a1 B'a1+E'b1 S'b1+E'a1 S'a1+G'b1,A'b1|T0,U'b0 B'b0+G'a1,A'a1|G1,U'a0 B'a0+E'b0 S'b0+E'a0 "
        "S'a0+G'b0,A'b0 G'a0 A'a0|G0"
    )
    again = Prefetch(halves=True, schedule="hecate", refetch_replicas=True).build(2, recompute=True)
    forward = "Aa{0}|T{0} Ga{0} Sa{0}+Ab{0} Gb{0} Sb{0}+Ea{0} Ba{0}+Eb{0} Bb{0}+Ua{0} Ub{0} "
    forward = forward.format(0) + forward.format(1)
    first, rest = "Gb{0} Sb{0}+Ga{0} ", "B'a{0}+E'b{0} S'b{0}+E'a{0} G'b{0} S'a{0}+A'b{0}{1} G'a{0} A'a{0}|G{0} "
    middle = "Sa{0}+Eb{0} Bb{0}+Ea{0} Ba{0}+Ub{0},U'b{0} B'b{0}+Ua{0},U'a{0} "
    text = first + middle + rest
    assert written(again) == (forward + text.format(1, "|T0") + text.format(0, "")).strip()
    # results that are not brought home again leave no exchange to put anything next to
    again = Prefetch(halves=True, schedule="hecate").build(1, recompute=True, results_again=False)
    text = first + "Sa{0}+Eb{0},Bb{0},Ub{0},U'b{0} B'b{0}+Ea{0},Ba{0},Ua{0},U'a{0} " + rest
    assert written(again).partition(" Ub0 ")[2] == text.format(0, "").strip()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("prefetch", EVERY, ids=str)
def test_every_schedule_keeps_the_order_of_data(prefetch, layers, recompute):
    """Replicas are whole before their experts, gradients leave after them, and transfers run as often as they
    should."""
    schedule = prefetch.build(layers, trans_share=0.3, agg_share=0.6, recompute=recompute)
    come, gone, computed, differentiated = {}, {}, set(), set()
    halves = (0, 1) if prefetch.halves else (None,)
    for direction, pair in schedule.windows():
        back = direction == "backward"
        for window in pair.pair:
            if window.stage in ("experts", "experts_again", "recompute"):
                if not back or (prefetch.refetch_replicas and window.layer < layers - 1):
                    np.testing.assert_allclose(come[back, window.layer], 1)
                if window.stage == "experts":
                    assert not back or (window.layer, window.half) in computed
                    (differentiated if back else computed).add((window.layer, window.half))
        for move in [move for window in pair.pair for move in window.moves]:
            whole = come if move.kind == "trans" else gone
            key = (back, move.layer) if move.kind == "trans" else move.layer
            np.testing.assert_allclose(whole.get(key, 0), move.start)  # parts in order
            whole[key] = move.stop
            assert move.kind == "trans" or (back and all((move.layer, half) in differentiated for half in halves))
    assert gone == dict.fromkeys(range(layers), 1)
    again = [(True, layer) for layer in range(layers - 1)] if prefetch.refetch_replicas else []
    assert come == dict.fromkeys([*((False, layer) for layer in range(layers)), *again], 1)


def test_exposed_time_is_that_of_the_papers():
    """Equation 8 of Pro-Prophet: max(0, Trans - FEC - FNEC) + max(0, Agg - BEC - BNEC); the others by hand."""
    rng = np.random.default_rng(0)
    attention, experts, trans, agg = rng.uniform(0, 3, (4, 50))
    times = Times(attention=attention, experts=experts, trans=trans, agg=agg)
    got = exposed(Prefetch(schedule="pro_prophet"), times)
    np.testing.assert_allclose(got[0], np.maximum(0, trans - attention - experts))
    np.testing.assert_allclose(got[1], np.maximum(0, agg - 2 * attention - 2 * experts))
    got = exposed(Prefetch(schedule="hecate"), times)
    np.testing.assert_allclose(got, [np.maximum(0, trans - attention), np.maximum(0, agg - 2 * attention)])
    both = sum(exposed(Prefetch(schedule="hecate", refetch_replicas=True), times))
    late = np.maximum(0, trans - attention) + np.maximum(0, agg + trans - 2 * attention)
    np.testing.assert_allclose(both, late, atol=1e-12)
    np.testing.assert_array_equal(exposed(Prefetch(), times), [trans, agg])


def timeline(schedule, times):
    """Run a step window after window: (its seconds, {layer: seconds of its transfers that nothing hides})."""
    now, late = 0.0, {}
    for direction, pair in schedule.windows():
        own, *others = (times.window(window, direction == "backward") for window in pair.pair)
        end = now + own if pair.others else now  # moves follow the exchange of the other half
        hidden_until = now + max(own, sum(others))
        for move in [move for window in pair.pair for move in window.moves]:
            start, end = end, end + (move.stop - move.start) * getattr(times, move.kind)
            late[move.layer] = late.get(move.layer, 0.0) + max(0.0, end - max(start, hidden_until))
        now = max(hidden_until, end)
    return now, late


def test_what_two_halves_hide_by_hand():
    """Windows of 1 for either half's attention, 2 in its backward, experts the same, and exchanges of 1.5."""
    times = Times(attention=2.0, experts=2.0, exchange=3.0, trans=1.0, agg=1.0)
    halves = Prefetch(halves=True)
    # forward: four pairs that last 1.5 each; backward: four that last 2
    np.testing.assert_allclose(stage_seconds(halves, times), 4 * 1.5 + 4 * 2.0)
    np.testing.assert_allclose(stage_seconds(Prefetch(), times), 4 * 3.0 + 3 * 4.0)
    # computed again: attention a alone and four exchanges in the forward; in the backward five exchanges that outlast
    # what is next to them, three next to experts or attention on their way back, and attention a alone
    again = 1.0 + 4 * 1.5 + 5 * 1.5 + 3 * 2.0 + 2.0
    np.testing.assert_allclose(stage_seconds(halves, times, recompute=True), again)
    np.testing.assert_allclose(stage_seconds(Prefetch(), times, recompute=True), 4 * 3.0 + 3 * 4.0 + 2 * 3.0 + 2.0)
    # Trans next to combine b and attention a, where the links have no time left; 0.5 are left for Agg in the backward
    np.testing.assert_allclose(exposed(halves, times), [1.0, 0.5])  # in windows of 1 and of 2
    # 3 turns each way; the first and the last layer have ends that stand alone, and their transfers
    turns = 3 * (4 * 1.5 + 1.0) + 3 * (4 * 2.0 + 0.5)
    ends = 1.0 + 3 * 1.5 + 1.5 + 1.5 + 3 * 2.0 + 2.0
    np.testing.assert_allclose(timeline(halves.build(4), times)[0], turns + ends)


def middle_layer_exposes(prefetch, times):
    """Return the seconds of layer 1's transfers that nothing hides, of 4 layers cut as the times say."""
    cut = dict(zip(("trans_share", "agg_share"), shares(times, prefetch.refetch_replicas), strict=True))
    return timeline(prefetch.build(4, **cut), times)[1][1]


def test_the_split_that_a_program_gets_hides_what_the_formula_promises():
    rng = np.random.default_rng(1)
    for attention, experts, trans, agg in rng.uniform(0.1, 3, (50, 4)):
        times = Times(attention=attention, experts=experts, trans=trans, agg=agg)
        prefetch = Prefetch(schedule="pro_prophet")
        np.testing.assert_allclose(middle_layer_exposes(prefetch, times), sum(exposed(prefetch, times)), atol=1e-12)
        assert shares(times)[0] == min(1, attention / trans)  # attention's window is filled first
    # With refetch: windows of 1 and 1 forward, 2 and 2 backward, for transfers of 2.5. Forward: 1 of Trans next to
    # attention, 1.5 next to the experts, 0.5 of that late. Backward: 1 of Trans and 1 of Agg next to attention, 1.5 of
    # each next to the experts, 1 of that late.
    times = Times(attention=1.0, experts=1.0, trans=2.5, agg=2.5)
    prefetch = Prefetch(schedule="pro_prophet", refetch_replicas=True)
    assert shares(times, True) == (0.4, 0.4)
    np.testing.assert_allclose(middle_layer_exposes(prefetch, times), 1.5)
    np.testing.assert_allclose(sum(exposed(prefetch, times)), 1.5)

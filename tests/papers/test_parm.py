"""Parm's layers against volumes and sizes worked out by hand from its section IV and table III."""

import dataclasses

import pytest

from moe_jax.cluster.layer_seconds import moving_seconds
from moe_jax.papers.parm import BASE, GROUPS, PLACES, SIZES, TABLE_4, gains, machine, memory, price, runs, shapes


def test_volumes_are_those_of_equations_1_13_and_14():
    """Testbed A, N_MP = N_ESP = 2, N = 1024, M = 256, K f = 2: E = 4 buckets of 512 rows, x = E T M N_ESP = 4 MiB.

    Bytes of one device's link without start-ups; a gather's backward is a reduce-scatter, a split's a gather.
    """
    cluster = dataclasses.replace(machine("A"), intra_latency=0.0, intra_step=0.0, intra_bandwidth=1.0)
    x, tokens = 4 * 512 * 1024 * 2, 1024 * 1024
    gather, exchange, all_reduce = tokens * 2 / 2, x * 3 / 4, 2 * x / 2
    baseline = (gather + 2 * exchange + all_reduce) + (x / 2 + 2 * exchange + gather)
    s1 = 2 * (2 * x / 2 * 7 / 8 + tokens / 2)
    s2 = 2 * (2 * x / 2 * 7 / 8 + x / 2 / 2)
    found = [moving_seconds(shape, cluster, "aas") for shape in shapes("A", (2, 2), 1024, 1024, 2.0)]
    assert found == pytest.approx([baseline, s1, s2])


def test_table_3_has_the_papers_combinations_and_those_that_fit():
    per_place = len(GROUPS)
    for values in SIZES.values():
        per_place *= len(values)
    assert 3 * per_place == 4374  # P of {8, 16, 32}
    # weights and gradients 4 M H / 4; tokens 5 N M, rows 3 x 4 x 4.8 N M; hidden rows 3 x 4.8 N H; all float32
    layer = ("B, 32", (4, 4), 16384, 4096, 4096, 2.4)
    want = 4 * (4096**2 + (5 + 57.6) * 16384 * 4096 + 14.4 * 16384 * 4096)
    assert memory(layer) == pytest.approx(want) and want > 11e9
    assert layer not in runs("B, 32", (4, 4)) and ("A", *layer[1:]) in runs("A", (4, 4))
    assert len(runs("A", (4, 4))) == per_place / len(GROUPS)


def test_algorithm_1_takes_the_shorter_exchanges_and_s2_wins_on_b_alone():
    for place in PLACES:
        for pair in TABLE_4:
            layers, found = runs(place, pair), gains(place, pair)
            s2_moves_less = [price(layer)[2, 0] < price(layer)[1, 0] for layer in layers]
            assert (found[:, 2] == found[range(len(layers)), [int(less) for less in s2_moves_less]]).all()
            assert place != "A" or (found[:, 1] < found[:, 0]).all()
    assert (gains("B, 32", (4, 2))[:, 1] > gains("B, 32", (4, 2))[:, 0]).any()
    # copies through host memory are dearer inside a node, where the baseline gathers and sums over shards
    assert (gains("B, 32", (4, 4), BASE._replace(peers=False)) > gains("B, 32", (4, 4))).all()

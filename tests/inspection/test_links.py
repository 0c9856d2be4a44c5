"""Times by hand on the toy target: 2 nodes of 2; 100 bytes/s inside, 10 bytes/s between a node and the network."""

import dataclasses

import pytest
from support.toy import TARGET

from moe_jax.cluster.collectives import traffic

ALL = ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    "kind, groups, inside, leaving, seconds",
    [
        # 3/4 of 160 bytes to others, 40 to the neighbour, 80 out of the node from each of 2 devices
        ("all-to-all", ALL, 40, 160, 16.0),
        ("all-to-all", ((0, 1), (2, 3)), 80, 0, 0.8),
        # one device a node: 80 bytes each, both groups share the node's adapter
        ("all-to-all", ((0, 2), (1, 3)), 0, 160, 16.0),
        # a device takes in 3/4 of 160, a node the 80 bytes that it has not
        ("all-gather", ALL, 120, 80, 8.0),
        ("reduce-scatter", ALL, 120, 80, 8.0),
        ("all-reduce", ALL, 240, 160, 16.0),
        ("all-reduce", ((0, 1), (2, 3)), 160, 0, 1.6),
        ("all-reduce", ((0,), (1,), (2,), (3,)), 0, 0, 0.0),
        ("collective-permute", ((0, 1), (1, 0)), 160, 0, 1.6),
        ("collective-permute", ((1, 2),), 0, 160, 16.0),
        # both devices of node 0 send out at once
        ("collective-permute", ((0, 2), (1, 3)), 0, 320, 32.0),
        ("collective-permute", ((3, 3),), 0, 0, 0.0),
    ],
)
def test_traffic_by_hand(kind, groups, inside, leaving, seconds):
    assert traffic(kind, 160, groups, TARGET) == (inside, leaving, pytest.approx(seconds, rel=1e-12))


def test_more_adapters_help_devices_that_send_at_once():
    two = dataclasses.replace(TARGET, adapters=2, node_bandwidth=20.0)
    assert traffic("collective-permute", 160, ((0, 2), (1, 3)), two)[2] == pytest.approx(16.0)
    assert traffic("collective-permute", 160, ((0, 2),), two)[2] == pytest.approx(16.0)  # one adapter of the two
    assert traffic("all-to-all", 160, ALL, two)[2] == pytest.approx(8.0)


def test_latency_counts_steps():
    slow = dataclasses.replace(TARGET, base_latency=1.0, intra_latency=2.0, inter_latency=5.0)
    assert traffic("all-gather", 0, ALL, slow)[2] == pytest.approx(1 + 2 * 2)  # nothing leaves: log2(4) steps inside
    assert traffic("all-gather", 1e-9, ALL, slow)[2] == pytest.approx(1 + 2 * 5)
    assert traffic("all-reduce", 1e-9, ((0, 1),), slow)[2] == pytest.approx(1 + 2 * 2)
    assert traffic("all-to-all", 1e-9, ALL, slow)[2] == pytest.approx(1 + 5)

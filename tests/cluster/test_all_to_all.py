"""Messages and bytes of the three all-to-alls by hand, and which one wins where the paper says so."""

import dataclasses
import pathlib

import pytest

from moe_jax.cluster import Cluster, read_cluster
from moe_jax.cluster.all_to_all import Messages, all_to_all_seconds, messages
from moe_jax.errors import UserError

PRESETS = pathlib.Path(__file__).parents[2] / "configs" / "cluster"


def shortest(*arguments):
    """Return the kind of exchange that is predicted to take least time; the flat one among equals."""
    seconds = all_to_all_seconds(*arguments)
    return min(seconds, key=seconds.get)


def test_messages_by_hand():
    """16 devices on nodes of 4, groups of 2 that slice tensors, 32 bytes sent in all by each device."""
    assert messages("all_to_all", 16, 4, 2, 32) == Messages(3, 6, 12, 24)
    assert messages("two_level", 16, 4, 2, 32) == Messages(3, 24, 3, 24)
    # 2 places in a node: 1 partner inside and 2 on each of 3 other nodes, 2 bytes each; then 16 bytes in the group
    assert messages("coordinated", 16, 4, 2, 32) == Messages(2, 18, 6, 12)
    assert messages("coordinated", 4, 8, 1, 32) == messages("all_to_all", 4, 8, 1, 32) == Messages(3, 24, 0, 0)
    cluster = Cluster(
        devices_per_node=4, nodes=4, intra_latency=1, inter_latency=10, intra_bandwidth=2, inter_bandwidth=2
    )
    seconds = all_to_all_seconds(cluster, 16, 2, 32)  # a device has half a byte a second to other nodes
    assert seconds == {"all_to_all": 3 + 3 + 120 + 48, "two_level": 3 + 12 + 30 + 48, "coordinated": 2 + 9 + 60 + 24}


def test_fewer_messages_win_where_messages_are_small():
    """As the paper says: flat inside a node, hierarchical across nodes, coordinated with tensor slicing."""
    cluster = dataclasses.replace(read_cluster(str(PRESETS / "h200.gin")), nodes=32)
    small, large = 64e3, 4e9
    assert shortest(cluster, 8, 1, small) == "all_to_all"
    for devices in (32, 128, 256):
        assert shortest(cluster, devices, 1, small) == "two_level"
        flat, _, coordinated = all_to_all_seconds(cluster, devices, 8, small).values()
        assert coordinated < flat / 3
    assert shortest(cluster, 16, 8, small) == "coordinated"
    assert shortest(cluster, 256, 1, large) == "all_to_all"  # there bytes count, and two levels send twice


def test_absent_latencies_and_uneven_groups_are_one_line():
    with pytest.raises(UserError, match="Cluster.intra_latency"):
        shortest(read_cluster(str(PRESETS / "hpwnv.gin")), 16, 1, 1e3)
    with pytest.raises(UserError, match="whole nodes"):
        messages("all_to_all", 12, 8, 1, 1)

"""The three all-to-alls: messages and bytes as rows that are followed device by device, and which one wins where."""

import collections
import dataclasses
import pathlib

import pytest

from moe_jax.cluster import Cluster, read_cluster
from moe_jax.cluster.collectives import all_to_all_seconds, messages
from moe_jax.errors import UserError

PRESETS = pathlib.Path(__file__).parents[2] / "configs" / "cluster"


def shortest(*arguments):
    """Return the kind of exchange that is predicted to take least time; the flat one among equals."""
    seconds = all_to_all_seconds(*arguments)
    return min(seconds, key=seconds.get)


def followed(kind, devices, per_node, slicing, shards):
    """Return what each collective of device 0 sends, as `messages` does, by following blocks of one byte.

    A device has one block for each expert home (`shards` devices), which all shards of the home are to get.
    """
    homes = devices // shards

    def hops(source, home):
        """Yield, by collective, the (from, to) of one block."""
        targets = range(home * shards, (home + 1) * shards)
        if kind == "all_to_all":
            yield [(source, target) for target in targets]
        elif kind == "two_level":
            node, place = source // per_node * per_node, [target % per_node for target in targets]
            yield [(source, node + p) for p in place]
            yield [(node + p, target) for p, target in zip(place, targets, strict=True)]
        else:
            there = home * shards // slicing * slicing + source % slicing  # the same place in the home's group
            mine = home * shards + source % shards
            yield [(source, there)]
            yield [(there, mine)]
            yield [(mine, target) for target in targets]

    sent = collections.defaultdict(lambda: collections.defaultdict(int))
    for source in range(devices):
        for home in range(homes):
            for turn, moves in enumerate(hops(source, home)):
                for origin, target in moves:
                    if origin == 0 and target != 0:
                        sent[turn][target] += 1
    parts = []
    for turn in range({"all_to_all": 1, "two_level": 2, "coordinated": 3}[kind]):
        near = [n for target, n in sent[turn].items() if target < per_node]
        far = [n for target, n in sent[turn].items() if target >= per_node]
        parts.append((len(near), sum(near), len(far), sum(far)))
    return tuple(parts)


@pytest.mark.parametrize(
    ("devices", "per_node", "slicing", "shards"),
    [(16, 4, 4, 2), (16, 8, 4, 1), (8, 8, 2, 2), (32, 8, 8, 8), (16, 4, 1, 1)],
)
def test_messages_are_those_of_rows_that_are_followed(devices, per_node, slicing, shards):
    # Z: a block for each home, of which the flat exchange sends a copy to every shard
    for kind, got in messages(devices, per_node, slicing, shards, float(devices)).items():
        assert got == tuple(map(pytest.approx, followed(kind, devices, per_node, slicing, shards))), kind


def test_seconds_by_hand():
    """16 devices on nodes of 4, groups of 2 that slice tensors and experts, 32 bytes sent in all by each device."""
    cluster = Cluster(
        devices_per_node=4, nodes=4, intra_latency=100, inter_latency=1000, intra_step=1, inter_step=10,
        intra_bandwidth=2, inter_bandwidth=2,
    )  # fmt: skip
    assert all_to_all_seconds(cluster, 16, 2, 2, 32) == {  # a device has half a byte a second to other nodes
        "all_to_all": 1000 + 3 + 120 + 48,
        "two_level": (100 + 3 + 12) + (1000 + 30 + 48),
        # 2 places in a node: 1 partner inside and 2 on each of 3 other nodes, 2 bytes each; 16 bytes in the group
        "coordinated": (1000 + 1 + 60 + 24) + (100 + 1 + 8),
    }


def test_each_of_the_three_wins_where_the_paper_says():
    """On H200s: flat inside a node and where bytes count, hierarchical across nodes, coordinated with slicing."""
    cluster = dataclasses.replace(read_cluster(str(PRESETS / "h200.gin")), nodes=32)
    token, prompts = 8192.0, 4e9
    assert shortest(cluster, 8, 1, 1, token) == "all_to_all"
    assert shortest(cluster, 16, 1, 1, token) == "all_to_all"  # 7 messages fewer do not pay for a second start-up
    for devices in (32, 128, 256):
        assert shortest(cluster, devices, 1, 1, token) == "two_level"
        assert shortest(cluster, devices, 8, 8, 8 * token) == "coordinated"  # rows go to 8 shards: fewer bytes across
        flat, _, coordinated = all_to_all_seconds(cluster, devices, 8, 8, 8 * token).values()
        assert (flat > 3 * coordinated) == (devices == 256)
    assert shortest(cluster, 256, 1, 1, prompts) == "all_to_all"  # there bytes count, and two levels send twice
    assert shortest(cluster, 256, 8, 8, prompts) == "coordinated"


def test_an_absent_figure_is_one_line():
    h200 = read_cluster(str(PRESETS / "h200.gin"))
    with pytest.raises(UserError, match="Cluster.inter_step"):
        shortest(dataclasses.replace(h200, inter_step=None), 16, 1, 1, 1e3)

"""Schedules timed by hand, and the modelled seconds that the compiler's scheduler is given.

On the toy target (2 nodes of 2; 100 bytes/s inside, 10 bytes/s between a node and the network) the block's exchange of
160 bytes takes 16 s, and its matmul of 1,024 bf16 FLOPs at 64 FLOP/s takes 16 s too; a test of a wait makes one longer.
"""

import dataclasses
import re

import numpy as np
import pytest
from support.toy import HEAD, LOOP, PRICES

from moe_jax.analysis.compile_ahead import read_text
from moe_jax.cluster import Links, cluster_of
from moe_jax.cluster.collectives import traffic
from moe_jax.cluster.hlo import parse_module
from moe_jax.cluster.layer_seconds import LayerShape, Transfer, transfer_seconds
from moe_jax.cluster.prices import Prices
from moe_jax.cluster.targets import parse_target
from moe_jax.cluster.timeline import play, scheduler_profile

ALL = ((0, 1, 2, 3),)
STARTS = dataclasses.replace(PRICES, start=1.0, step=2.0, node_start=10.0, node_step=5.0)


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
    assert traffic(kind, 160, groups, PRICES) == (inside, leaving, pytest.approx(seconds, rel=1e-12))


@pytest.mark.parametrize(
    "kind, groups, seconds",
    [
        ("all-gather", ((0, 1), (2, 3)), 1 + 2),
        ("all-gather", ALL, 10 + 2 * 5),  # log2(4) rounds
        ("all-reduce", ((0, 1),), 1 + 2 * 2),
        ("all-to-all", ((0, 1), (2, 3)), 1 + 2),
        ("all-to-all", ALL, 10 + 2 + 2 * 5),  # one message inside and two to the other node
        ("collective-permute", ((0, 1),), 1 + 2),
        ("collective-permute", ((0, 2),), 10 + 5),
    ],
)
def test_a_collective_starts_once_wherever_it_is_asked(kind, groups, seconds):
    """By a program, a planner, a replay and `parm`: one start and a step for each message or round."""
    prices = STARTS
    assert traffic(kind, 1e-9, groups, prices)[2] == pytest.approx(seconds)
    if kind != "all-to-all":
        return
    cluster, members = dataclasses.replace(cluster_of(prices), nodes=len(groups[0]) // 2), len(groups[0])
    few = np.full((members, members), 1e-12)
    across = 1e-12 * (members > 2)
    shape = LayerShape(tokens=1, model_dim=1, rows=1, ep_size=members)
    asked = {
        "replay": Links.of(cluster, members, "test").exchange(few),
        "planner": Links.of(cluster, members, "test").received(few.sum(0)),
        "transfer": Links.of(cluster, members, "test").uniform(1e-12, across),
        "parm": transfer_seconds([Transfer("all_to_all", "expert", 1e-12)], shape, cluster, "test"),
    }
    assert {name: float(value) for name, value in asked.items()} == pytest.approx(dict.fromkeys(asked, seconds))


def only(timeline):
    (flight,) = timeline.flights.values()
    return flight


def test_a_transfer_as_long_as_its_compute_is_hidden():
    timeline = play(parse_module(LOOP), PRICES)
    flight = only(timeline)
    assert timeline.seconds == pytest.approx(48.0) and timeline.compute_seconds == pytest.approx(48.0)
    assert timeline.flops == {"bf16": 3 * 1024.0}
    assert (flight.kind, flight.role, flight.scope, flight.bytes) == ("all-to-all", "all-to-all", "moe/dispatch", 160)
    assert (flight.executions, flight.loops, flight.group_size, flight.nodes_of_a_group) == (3, (3,), 4, 2)
    assert flight.seconds == pytest.approx(48.0) and flight.exposed_seconds == 0.0
    assert flight.executions_overlapping_matmuls == flight.executions_overlapping_kernels == 3
    assert flight.overlapped == {"moe/experts": pytest.approx(48.0)}


def test_a_transfer_that_ends_before_the_matmul_begins_is_exposed_whole():
    dot, done = (re.search(rf"  %{name} = .*\n", LOOP).group() for name in ("dot.1", "all-to-all-done"))
    flight = only(play(parse_module(LOOP.replace(dot, "").replace(done, done + dot)), PRICES))
    assert flight.exposed_seconds == flight.seconds == pytest.approx(48.0)
    assert (
        flight.executions_overlapping_matmuls == flight.executions_overlapping_kernels == 0 and flight.overlapped == {}
    )


TWO = (
    HEAD
    + """
ENTRY %main (x: f32[40]) -> f32[160] {
  %x = f32[40]{0} parameter(0)
  %a = bf16[8,8]{1,0} constant({...})
  %ags = (f32[40]{0}, f32[80]{0}) all-gather-start(%x), replica_groups={{0,1},{2,3}}, dimensions={0}
  %cps = (f32[40]{0}, f32[40]{0}) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %agd = f32[80]{0} all-gather-done(%ags)
  %ars = f32[40]{0} all-reduce-start(%x), replica_groups={{0,2},{1,3}}, to_apply=%sum
  %cpd = f32[40]{0} collective-permute-done(%cps)
  %dot.9 = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %ard = f32[40]{0} all-reduce-done(%ars)
}
"""
)


def test_transfers_share_links_one_after_the_other():
    """All-gather of 320 bytes inside nodes: 1.6 s. The permute of 160 waits for it, ends at 3.2. The all-reduce crosses
    nodes, one device of each: 2 groups of 2 x 80 bytes leave a node: 32 s; begun at 1.6 it ends at 33.6. It uses no
    link inside. The matmul runs from 3.2 to 19.2."""
    flights = play(parse_module(TWO), PRICES).flights
    gather, permute, reduce = flights["ags"], flights["cps"], flights["ars"]
    assert gather.bytes == 320 and gather.exposed_seconds == pytest.approx(1.6)
    assert permute.waited_for_links_seconds == pytest.approx(1.6) and permute.exposed_seconds == pytest.approx(1.6)
    assert reduce.bytes == 160 and reduce.bytes_leaving_a_node == 320
    assert reduce.exposed_seconds == pytest.approx(33.6 - 19.2) and reduce.executions_overlapping_matmuls == 1


def test_profile_by_hand():
    """Matmul and exchange take 16 s, the loop runs both three times; what is free has no entry. Names are those that
    the scheduler gave."""
    renamed = LOOP.replace('op_name="jit(f)/jvp(moe)/while/body/experts/dot_general"', 'scheduling_name="dot.7.clone"')
    assert sorted(scheduler_profile(parse_module(renamed), PRICES).splitlines()) == [
        'costs { name: "all-to-all-start" cost_us: 16000000.000 }',
        'costs { name: "dot.7.clone" cost_us: 16000000.000 }',
        'costs { name: "while.1" cost_us: 96000000.000 }',
        'latencies { source: "all-to-all-start" target: "all-to-all-done" latency_us: 16000000.000 }',
    ]


@pytest.mark.parametrize("name", ["replicas", "replicas-0.12.0.1"])
def test_every_transfer_of_a_real_schedule_has_a_latency(name):
    """The scheduler looks for the done of a kernel among the costs, unlike for a collective's; jax 0.12 has such."""
    text = read_text(f"{__file__.rpartition('/')[0]}/fixtures/{name}.hlo.xz")
    module = parse_module(text)
    profile = scheduler_profile(module, Prices(parse_target("h200:2x2")))
    starts = re.findall(r"%(\S+) = \S.* (?:all-to-all|all-reduce|all-gather|collective-permute|fusion)-start\(", text)
    instructions = [i for c in module.computations.values() for i in c.instructions]
    names = {i.scheduling_name for i in instructions if i.name in set(starts)}
    dones = [i.scheduling_name for i in instructions if i.opcode == "fusion-done"]
    assert all(f'costs {{ name: "{done}" cost_us: 0.000 }}' in profile for done in dones)
    assert bool(dones) == ("0.12" in name)
    latencies = dict(re.findall(r'source: "([^"]+)" target: "[^"]+" latency_us: (\S+)', profile))
    assert len(names) == len(starts) > 10 and set(latencies) == names
    assert names <= set(re.findall(r'costs { name: "([^"]+)"', profile)) and min(map(float, latencies.values())) > 0

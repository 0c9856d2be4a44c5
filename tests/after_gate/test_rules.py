"""Each rule on the device does what its planner plans on the host, for every source, in float64.

Compared are the tokens of each (source, expert) by device, counted from the tables as a token would read them. Shares
are rounded to 2^-16 on both sides after sums in another order, so one token per (source, expert, device) may differ.
What a late transfer brings is followed through its tables, and every slot that gets tokens must hold their expert.
"""

import dataclasses
import functools
import types
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from support.options import planner_config
from support.placements import counted_destinations

from moe_jax.analysis.compile_ahead import described_devices
from moe_jax.cluster import Cluster
from moe_jax.cluster.hlo import parse_module
from moe_jax.cluster.prices import Prices
from moe_jax.cluster.targets import parse_target
from moe_jax.cluster.timeline import play
from moe_jax.moe.after_gate import decide_by, level_in_one_kernel, levelled
from moe_jax.parallel.sparse_all_gather import shrunk
from moe_jax.parallel.static_sizes import TransferShape
from moe_jax.planning import routing
from moe_jax.planning.balanced import level_quotas
from moe_jax.planning.balancer import build_planner
from moe_jax.planning.config import PlannerConfig
from moe_jax.planning.cost import PRICES, Cost
from moe_jax.planning.placement import Placement, TransferSizes, fit_replicas, late_size, transfer_sizes
from moe_jax.planning.plan_shape import build_shape, fill_tables
from moe_jax.planning.routing import node_edges

DEVICES, EXPERTS, SLOTS, NODE, HOMES = 8, 16, 3, 4, 4
KINDS = ["skewed", "mild", "one_hot", "unused"]


def late_of(offers, slots, crossing=0):
    """A late transfer, by node where it has crossings."""
    return TransferShape(
        devices=DEVICES, devices_per_node=NODE, offers=offers, slots=slots, by_node=crossing > 0, crossing=crossing
    )


# roomy, and with X, m or Cp so small that it binds
LATE = {
    "flat": late_of(4, SLOTS),
    "flat_offers": late_of(1, SLOTS),
    "by_node": late_of(4, SLOTS, 8),
    "by_node_crossing": late_of(3, SLOTS, 1),
    "by_node_slots": late_of(4, 1, 8),
}


def cost_of(late, bandwidth=3e9, hidden_dim=128, price="executor"):
    cluster = Cluster(
        name="test", nodes=DEVICES // NODE, devices_per_node=NODE, flat=True, intra_bandwidth=bandwidth, flops=3e13
    )
    prices = PRICES[price](cluster=cluster, model_dim=64, hidden_dim=hidden_dim)
    return Cost(prices=prices, replica_slots=SLOTS, late=late)


def loads_of(kind, seed=0):
    """Loads [1, S, E] of one layer, 512 choices a source."""
    rng = np.random.default_rng(seed)
    if kind == "one_hot":
        p = np.full(EXPERTS, 1e-9)
        p[5] = 1
    elif kind == "unused":
        p = np.where(np.arange(EXPERTS) % 2, 0.0, 1.0)
    else:
        p = rng.dirichlet(np.full(EXPERTS, {"skewed": 0.15, "mild": 2.0}[kind]))
    rows = [rng.multinomial(512, p / p.sum()) for _ in range(DEVICES)]
    if kind == "unused":
        rows[3] = 0 * rows[3]  # a source without tokens
    return np.stack(rows)[None]


def homes(seed):
    """Homes anywhere, E / D on each device on average, up to four on one."""
    rng = np.random.default_rng(seed)
    while True:
        home = rng.permutation(np.repeat(np.arange(DEVICES), EXPERTS // DEVICES))
        home[: seed % 3] = 0
        if np.bincount(home).max() <= HOMES:
            return Placement(home[None].astype(np.int32), devices=DEVICES, devices_per_node=NODE)


def shape_of(placement, late=None, ahead=True):
    """One shape for all cases of a test, so that little is compiled."""
    shape = build_shape(placement)
    room = TransferShape(devices=DEVICES, devices_per_node=NODE, offers=HOMES, slots=SLOTS)
    return dataclasses.replace(
        shape, home_slots=HOMES, bank_rows=EXPERTS, candidates=DEVICES, ahead=room if ahead else None, late=late
    )


@functools.cache
def decider(rule, shape):
    def one(tables, counts, me):
        mine = jax.tree.map(lambda leaf: leaf[me], tables)
        decided = decide_by(rule, mine, counts, tables.slot_expert, me, shape)
        return dict(zip(("tables", "transfer", "used"), decided, strict=True))

    return jax.jit(jax.vmap(one, in_axes=(None, None, 0)))


def decide(planner, cost, shape, placement, loads, double=True):
    """Return what every source decides: arrays with a leading D."""
    rule = planner.late_rule(shape, cost, 1)
    with jax.enable_x64(double):
        tables = jax.tree.map(lambda leaf: jnp.asarray(leaf[:, 0]), fill_tables(shape, placement))
        devices = jnp.arange(DEVICES, dtype=jnp.int32)
        decided = decider(rule, shape)(tables, jnp.asarray(loads[0], jnp.int32), devices)
        return types.SimpleNamespace(**jax.tree.map(np.asarray, decided))


def destinations(tables, slots, loads):
    """Count tokens by device as tokens read the tables: -> (int [S, E, D], (expert, slot) of every entry in use)."""
    n = loads[0][:, :, None].astype(np.uint32)
    edges = tables.dest_num * n // tables.dest_den[:, :, None]
    upto = np.minimum(np.maximum.accumulate(edges, axis=2), n).astype(np.int64)
    tokens = np.diff(upto, axis=2, prepend=0)
    assert (tokens.sum(axis=2) == loads[0]).all()
    found = np.zeros(loads[0].shape + (DEVICES,), np.int64)
    s, e, q = np.nonzero(tokens)
    slot = tables.dest_slot[s, e, q]
    np.add.at(found, (s, e, slot // slots), tokens[s, e, q])
    return found, (e, slot)


def holders_of(shape, placement):
    """Return who is in which slot before the gate: int [D, G]."""
    return np.asarray(fill_tables(shape, placement).slot_expert)[:, 0]


def arrivals(transfer, late, homes_there):
    """Follow a transfer through its tables: the expert in each late slot, int [D, m], -1 for none.

    Args:
      transfer: tables of all devices, arrays [D, ...]; homes_there: int [D, Hs], the expert in each home slot.
    """
    padded = np.concatenate([homes_there, np.full((DEVICES, 1), -1)], axis=1)
    offered = np.take_along_axis(padded, np.minimum(transfer.offer, homes_there.shape[1]), axis=1)
    here = np.concatenate([offered.reshape(late.nodes, -1), np.full((late.nodes, 1), -1)], axis=1)
    places = here[:, :-1]
    if late.by_node:
        pick = transfer.pick.reshape(late.nodes, late.inside, late.nodes, late.crossing)
        assert (pick == pick[:, :1]).all()  # equal on the devices of a node
        sent = np.stack([here[node][pick[node, 0]] for node in range(late.nodes)])  # [from, to, Cp]
        places = np.concatenate([places, sent.swapaxes(0, 1).reshape(late.nodes, -1)], axis=1)
    assert places.shape[1] == late.places
    places = np.concatenate([places, np.full((late.nodes, 1), -1)], axis=1)
    want = transfer.want.reshape(late.nodes, late.inside, late.inside, late.slots)
    assert (want == want[:, :1]).all()
    return np.concatenate([places[node][want[node, 0]] for node in range(late.nodes)])


def assert_brings(decided, shape, holders, home, added):
    """The transfer fills late slots with the replicas `added` bool [E, D] and no others; returns holders with them."""
    late = shape.late
    used = np.array(decided.used[:3]).T
    assert (used == used[0]).all()  # all devices take the same branch
    used = used[0]
    replicas = transfer_sizes(home[None, :, None] == np.arange(DEVICES), added[None], late.inside)
    if not added.any():
        assert not used[1]
        return holders
    assert used.tolist() == [replicas.offers, replicas.slots, replicas.crossing]
    assert (used <= [late.offers, late.slots, late.crossing]).all()
    homes_there = holders[:, : shape.home_slots]
    came = arrivals(decided.transfer, late, homes_there)
    found = np.zeros_like(added)
    device, slot = np.nonzero(came >= 0)
    found[came[device, slot], device] = True
    np.testing.assert_array_equal(found, added)
    assert len(device) == added.sum()  # each once
    number = int(late_size(replicas, late)[0])
    assert int(late_size(TransferSizes(*jnp.asarray(used)), late, jnp)) == number
    small = late.halves()[number - 1]  # the size that is fetched brings the same
    cut = jax.tree.map(np.asarray, jax.vmap(lambda tables: shrunk(tables, late, small))(decided.transfer))
    np.testing.assert_array_equal(arrivals(cut, small, homes_there), came[:, : small.slots])
    assert (came[:, small.slots :] < 0).all()
    ahead = shape.home_slots + shape.replica_slots - shape.late_slots
    assert (holders[:, ahead:] < 0).all()  # slots of their own
    return np.concatenate([holders[:, :ahead], came], axis=1)


WANTED = ["all", "one_home", "one_node", "random"]


def fitting(wanted, order, home, late):
    """Take experts whole while they fit, one by one: bool [E, D]."""
    offers, slots, crossing, added = Counter(), Counter(), Counter(), np.zeros_like(wanted)
    for expert in order:
        devices, node = np.flatnonzero(wanted[expert]), home[expert] // late.inside
        pairs = {(node, other) for other in devices // late.inside if other != node}
        full = [offers[home[expert]] >= late.offers, *(slots[device] >= late.slots for device in devices)]
        if len(devices) and not any([*full, *(crossing[pair] >= late.crossing for pair in pairs)]):
            added[expert] = wanted[expert]
            offers[home[expert]] += 1
            slots.update(devices)
            crossing.update(pairs)
    return added


@pytest.mark.parametrize("late", LATE)
def test_what_fits_the_late_transfer_is_taken_whole(late):
    """All on one home, on one node, everything, anything: X, Cp and m bind, and what does not fit is left out whole."""
    late, left = LATE[late], 0
    for seed, kind in enumerate(WANTED * 2):
        rng, home = np.random.default_rng(seed), homes(seed).home[0]
        busiest = np.bincount(home).argmax()
        source = {"one_home": home == busiest, "one_node": home // NODE == busiest // NODE}
        wanted = source.get(kind, np.ones(EXPERTS, bool))[:, None] & (np.arange(DEVICES) != home[:, None])
        if kind == "random" or seed >= len(WANTED):
            wanted &= rng.random(wanted.shape) < 0.15
        order = rng.permutation(EXPERTS)
        added = fit_replicas(np, wanted[None], order[None], home[None], late)[0][0]
        np.testing.assert_array_equal(added, fitting(wanted, order, home, late))
        left += (wanted & ~added).any()
    assert left


# the rule, the late transfer and whether it is too small for some plans, the planner's knobs
RULE_CASES = [("shadows", late, {"name": "fastermoe"}) for late in LATE]
RULE_CASES += [("calibration", late, {"name": "hecate"}) for late in ("flat_offers", "by_node", "by_node_crossing")]
RULE_CASES += [("quotas", late, {"name": "llep"}) for late in ("flat", "flat_offers", "by_node_crossing")]


def compared(planner, cost, shape, ahead, loads, rounding=0):
    """Return (what is decided, the planner's placement, tokens by device), after comparing where every token goes.

    Shares round: a token, and in float32, as training runs, 0.5% of a device's mean load.
    """
    want = planner.refine(loads, ahead, cost)
    decided = decide(planner, cost, shape, ahead, loads)
    found, (expert, slot) = destinations(decided.tables, shape.slots, loads)
    assert np.abs(found - counted_destinations(want, loads)[0]).max() <= rounding
    if rounding:
        single = destinations(decide(planner, cost, shape, ahead, loads, double=False).tables, shape.slots, loads)[0]
        assert np.abs(single.sum((0, 1)) - found.sum((0, 1))).max() <= 0.005 * loads.sum() / DEVICES
    holders, added = holders_of(shape, ahead), want.holds[0] & ~ahead.holds[0]
    if shape.late:
        holders = assert_brings(decided, shape, holders, ahead.home[0], added)
    np.testing.assert_array_equal(holders.reshape(-1)[slot], expert)  # what gets tokens holds their expert
    return decided, want, found.sum((0, 1))


@pytest.mark.parametrize(
    ("rule", "late", "knobs"), RULE_CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_late_replicas_are_those_of_the_planner(rule, late, knobs):
    """Whom the rule serves where, by which late replicas; whole numbers but for quotas."""
    numbers, cut, late = set(), 0, LATE[late]
    for seed, kind in enumerate(KINDS * (3 if rule == "calibration" else 2)):
        placement = homes(seed)
        planner = build_planner(PlannerConfig(when="after_gate", replica_slots=SLOTS, **knobs))
        if rule == "calibration":
            rates = (3e13,) if seed % 2 else (3e9, 1 << 16, "paper" if seed % 4 else "executor")
            planner = build_planner(planner_config(replica_slots=SLOTS, overlap_degree=8, **knobs))
            cost, loads = cost_of(late, *rates), loads_of(kind, seed + 100)
            few = dataclasses.replace(cost, replica_slots=seed % (SLOTS + 1))
            ahead = planner.propose(loads_of(kind, seed), placement, few)
        else:
            rates = () if rule == "quotas" else (3e8, 128, "paper") if seed % 2 else (3e13,)
            cost, loads = cost_of(late, *rates), loads_of(kind, seed)
            ahead = planner.propose(loads_of(kind), placement, cost)
            assert not len(ahead.replicas)
        shape = shape_of(ahead, late, ahead=rule == "calibration")
        want = compared(planner, cost, shape, ahead, loads, rounding=int(rule == "quotas"))[1]
        numbers.add(len(want.replicas) - len(ahead.replicas))
        cut += planner.counters["late_cut"]
    roomy = late in (LATE["flat"], LATE["by_node"])
    assert cut or roomy
    assert len(numbers) > (2 if rule == "quotas" else 1) or rule == "shadows" and not roomy
    assert rule != "calibration" or (0 in numbers and max(numbers) > 3)


@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_those_of_the_planner(kind):
    better = 0
    for seed in range(6):
        cost, placement = cost_of(None), homes(seed)
        planner = build_planner(PlannerConfig(name="balanced", when="after_gate", replica_slots=SLOTS))
        ahead = planner.propose(loads_of(kind, seed), placement, cost)
        loads = loads_of(kind, seed + 100 if seed % 2 else seed) + loads_of("mild", seed)
        decided, _, found = compared(planner, cost, shape_of(ahead), ahead, loads, rounding=1)
        assert decided.transfer is None and decided.used is None
        better += found.max() < routing.pair_loads(ahead, loads).sum(axis=1)[0].max()
    assert better


# the rounds of `balanced` in one kernel, interpreted, against the loops of the planner
SWEEPS = 8
LEVELLED = ("random", "equal", "unused", "none", "one")


def loops(totals, held, home):
    return level_quotas(np, totals[None], held[None], home[None], SWEEPS)[0]


def case(experts, devices, replicas, kind, seed):
    rng = np.random.default_rng(seed)
    home = np.zeros((experts, devices), bool)
    home[np.arange(experts), np.sort(rng.integers(0, devices, experts))] = True
    held = home.copy()
    for device in range(devices):
        held[rng.integers(0, experts, replicas), device] = True
    counts = rng.integers(0, 60, (devices, experts)).astype(float)
    if kind == "equal":
        counts[:] = 7
    if kind in ("unused", "none", "one"):
        counts[:, rng.permutation(experts)[experts // 2 if kind == "unused" else kind == "one" :]] = 0
    return counts, held, home


@pytest.mark.parametrize("sizes", [(16, 8, 3), (5, 12, 1)], ids=str)
def test_one_kernel_decides_what_the_loops_do(sizes):
    kernel = jax.jit(functools.partial(level_in_one_kernel, sweeps=SWEEPS, interpret=True))
    cases = [case(*sizes, kind, seed) for seed, kind in enumerate(LEVELLED * 2)]
    totals, held, home = (np.stack(of) for of in zip(*((c.sum(axis=0), *rest) for c, *rest in cases), strict=True))
    together = level_quotas(np, totals, held, home, SWEEPS)  # a layer's quotas depend on its own loads alone
    with jax.enable_x64(True):
        for at, (counts, held, home) in enumerate(cases):
            totals = counts.sum(axis=0)
            want, got = loops(totals, held, home), np.asarray(kernel(jnp.asarray(totals), held, home))
            np.testing.assert_array_equal(together[at], want)
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-10 * max(totals.max(), 1))
            supply = counts.reshape(-1, NODE, len(totals)).sum(axis=1).T
            edges = [np.asarray(node_edges(jnp, supply, jnp.asarray(q), home, 0)) for q in (want, got)]
            np.testing.assert_array_equal(*edges)
    counts, held, home = case(*sizes, "random", 0)
    totals = counts.sum(axis=0)
    got = kernel(jnp.asarray(totals, jnp.float32), held, home)  # as training runs
    np.testing.assert_allclose(got, loops(totals, held, home), rtol=0, atol=1e-5 * totals.max())


@pytest.mark.gpu_compile
@pytest.mark.parametrize("device", ["a100", "h200"])
def test_a_gpu_runs_the_rounds_in_one_kernel(device):
    target = parse_target(f"{device}:1x1")
    sharding = SingleDeviceSharding(described_devices(target)[0])
    shapes = [((64,), jnp.float32), ((64, 32), bool), ((64, 32), bool)]
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]
    text = jax.jit(functools.partial(levelled, sweeps=SWEEPS)).lower(*arguments).compile().as_text()
    timeline = play(parse_module(text), Prices(target))
    assert timeline.kernels <= 3 and " while(" not in text and not timeline.unknown_calls

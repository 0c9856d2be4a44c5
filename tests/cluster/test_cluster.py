"""Cluster files, absent figures, link traffic, and fits with known answers."""

import pathlib
import re

import numpy as np
import pytest

from moe_jax.cluster import (
    Cluster,
    Fit,
    all_reduce_bytes,
    exchange_seconds,
    fit_alpha_beta,
    fit_saa,
    link_traffic,
    overlap_bound,
    parm_choice,
    read_cluster,
    split_saa,
    uniform_seconds,
    write_cluster,
)
from moe_jax.cluster.layer_seconds import ExpertLoad, LayerShape, pairwise_seconds
from moe_jax.errors import UserError

PRESETS = pathlib.Path(__file__).parents[2] / "configs" / "cluster"
NAMES = "parm_a parm_b johnny trevor hpwnv hpnv lpwnv hecate_a hecate_b h200 flat_3gbs_30tflops host_devices".split()


def test_every_preset_ships_and_says_where_its_figures_come_from():
    assert sorted(path.stem for path in PRESETS.glob("*.gin")) == sorted(NAMES)
    for name in NAMES:
        cluster = read_cluster(PRESETS / f"{name}.gin")
        assert cluster.name == name
        assert cluster.source or name in ("flat_3gbs_30tflops", "host_devices")  # of no machine
        assert "absent" in (PRESETS / f"{name}.gin").read_text()


@pytest.mark.parametrize(
    ("name", "nodes", "per_node", "inter"),
    [
        ("parm_b", 8, 4, 12.5e9),
        ("johnny", 2, 8, 6.25e9),
        ("trevor", 16, 4, 12.5e9),
        ("hecate_a", 4, 8, 12.5e9),
        ("hecate_b", 4, 8, 50e9),
    ],
)
def test_presets_carry_the_papers_figures(name, nodes, per_node, inter):
    cluster = read_cluster(PRESETS / f"{name}.gin")
    assert (cluster.nodes, cluster.devices_per_node, cluster.inter_bandwidth) == (nodes, per_node, inter)
    # what derives tau and prices a plan: a device's links and FLOP/s
    assert cluster.intra_bandwidth > inter / per_node and cluster.flops > 5e13


@pytest.mark.parametrize(("name", "device"), [("hecate_a", "v100"), ("hecate_b", "a100"), ("h200", "h200")])
def test_presets_count_nvlink_one_way(name, device):
    """Data sheets, and Hecate, give both directions together: the description of the same GPU has one."""
    text = (PRESETS.parents[1] / "moe_jax" / "cluster" / "devices" / f"{device}.txt").read_text()
    one_way = float(re.search(r"^Target.intra_bandwidth = (\S+)", text, re.MULTILINE).group(1))
    both_ways = float(re.search(r"NVLink (\d+) GB/s both ways", text).group(1)) * 1e9
    assert read_cluster(PRESETS / f"{name}.gin").intra_bandwidth == one_way == both_ways / 2


def test_json_keeps_every_field(tmp_path):
    cluster = Cluster(name="here", nodes=2, devices_per_node=4, flops=1e12, fits={"all_to_all:expert": (1e-5, 2e-9)})
    write_cluster(cluster, tmp_path / "cluster.json")
    assert read_cluster(tmp_path / "cluster.json") == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Cluster.nodes = 2\nnodes = 3", r"c.gin:2: 'nodes = 3' is not a line 'Cluster.field = value'"),
        ("Cluster.flop = 1e12", r"Cluster has no field 'flop'; its fields are name, nodes"),
        ("Cluster.flops = 1e12 * 2", r"c.gin:1: '1e12 \* 2' of Cluster.flops is not a Python literal"),
        ("Cluster.nodes = 2\nCluster.nodes = 2", r"c.gin:2: Cluster.nodes is bound twice"),
        ("Cluster.nodes = 0", r"Cluster.nodes \(0\) must be a whole number of at least 1"),
        ("Cluster.flops = -1.0", r"Cluster.flops \(-1.0\) must be above 0"),
        ("Cluster.fits = {'a2a': (1,)}", r"Cluster.fits\['a2a'\] .* must be alpha, beta"),
    ],
)
def test_wrong_files_are_named(tmp_path, text, message):
    (tmp_path / "c.gin").write_text(text)
    with pytest.raises(UserError, match=message):
        read_cluster(tmp_path / "c.gin")


def test_missing_files_and_wrong_json_are_named(tmp_path):
    with pytest.raises(UserError, match=r"cluster file .* does not exist"):
        read_cluster(tmp_path / "none.gin")
    (tmp_path / "c.json").write_text("[]")
    with pytest.raises(UserError, match="c.json is not a calibration file"):
        read_cluster(tmp_path / "c.json")


def test_absent_field_names_field_cluster_and_requester():
    johnny = read_cluster(PRESETS / "johnny.gin")
    with pytest.raises(UserError, match=r"the start needs Cluster.intra_latency, which cluster 'johnny' .*: h200$"):
        johnny.need("intra_latency", "the start")
    with pytest.raises(UserError, match=r"planner 'hecate' needs Cluster.flops, .* configs/cluster/: .*trevor$"):
        Cluster(name="mine").need("flops", "planner 'hecate'")
    with pytest.raises(UserError, match=r"schedule needs Cluster.fits\['saa'\]"):
        johnny.fit("saa", "schedule")
    with pytest.raises(UserError, match=r"a trace has 12 devices, but cluster 'johnny' has nodes \(2\) x .*\(8\) = 16"):
        johnny.check_devices(12, "a trace")


def test_bandwidth_is_the_slow_links():
    assert read_cluster(PRESETS / "flat_3gbs_30tflops.gin").bandwidth("test") == 3e9
    assert read_cluster(PRESETS / "johnny.gin").bandwidth("test") == 6.25e9
    assert read_cluster(PRESETS / "hecate_a.gin").bandwidth("test") == 12.5e9


def test_link_traffic_follows_the_tree():
    # Two nodes of two. 0 -> 1 stays inside (5); 0 -> 2 (7) and 3 -> 1 (11) cross; 2 -> 2 moves nothing.
    pairs = np.zeros((4, 4))
    pairs[0, 1], pairs[0, 2], pairs[3, 1], pairs[2, 2] = 5, 7, 11, 100
    cluster = Cluster(nodes=2, devices_per_node=2, intra_bandwidth=8.0, inter_bandwidth=1.0)
    traffic = link_traffic(cluster, pairs)
    np.testing.assert_array_equal(traffic.device_up, [12, 0, 0, 11])
    np.testing.assert_array_equal(traffic.device_down, [0, 16, 7, 0])
    np.testing.assert_array_equal(traffic.node_up, [7, 11])
    np.testing.assert_array_equal(traffic.node_down, [11, 7])
    assert exchange_seconds(cluster, pairs, "test") == 11  # the node link: 11 / 1 > 16 / 8
    flat = Cluster(nodes=2, devices_per_node=2, intra_bandwidth=8.0, flat=True)
    assert exchange_seconds(flat, pairs, "test") == 2


def test_cards_and_switches_are_shared_links():
    # Two nodes of four devices; two cards and two sockets a node. 0 -> 4 and 1 -> 5 share card 0, 2 -> 6 has card 1;
    # 0 -> 2 (8 bytes) passes between the sockets.
    pairs = np.zeros((8, 8))
    pairs[0, 4], pairs[1, 5], pairs[2, 6], pairs[0, 2], pairs[0, 1] = 3, 4, 5, 8, 100
    links = {"nodes": 2, "devices_per_node": 4, "intra_bandwidth": 1000.0, "inter_bandwidth": 2.0, "cards_per_node": 2}
    cluster = Cluster(**links, switches_per_node=2, switch_bandwidth=4.0)
    traffic = link_traffic(cluster, pairs)
    np.testing.assert_array_equal(traffic.node_up, [7, 5, 0, 0])
    np.testing.assert_array_equal(traffic.switch_up, [8, 0, 0, 0])
    assert exchange_seconds(cluster, pairs, "test") == 7  # card 0: 7 bytes at 2 / 2 a second
    # every device sends 12 bytes to its node and 2 to others: a switch passes 2 x 12 x 2/3 of them, a card 2 x 2
    assert uniform_seconds(cluster, 12.0, 2.0, "test") == 4
    assert uniform_seconds(cluster, 12.0, 0.0, "test") == 2 * 12 * 2 / 3 / 4
    # as many cards as devices: each has its own; with more it still reaches only one
    rails = Cluster(**{**links, "cards_per_node": 4})
    assert uniform_seconds(rails, 0.0, 2.0, "test") == 4
    assert uniform_seconds(Cluster(**{**links, "cards_per_node": 8}), 0.0, 2.0, "test") == 8
    # one of two groups that use the machines at the same time gets half
    assert uniform_seconds(rails.part_of(2), 0.0, 2.0, "test") == 8
    with pytest.raises(UserError, match=r"Cluster.cards_per_node \(0\) must be a whole number of at least 1"):
        Cluster(cards_per_node=0)


def test_uniform_traffic_shares_the_cards():
    """On 4 x 4, a node with one device's bandwidth takes 3.2 times as long as links of their own."""
    pairs = np.ones((16, 16))
    links = {"nodes": 4, "devices_per_node": 4, "intra_bandwidth": 1.0, "inter_bandwidth": 1.0}
    shared, own = (exchange_seconds(Cluster(**links, flat=flat), pairs, "test") for flat in (False, True))
    assert shared / own == pytest.approx(4 * 12 / 15)


def test_ring_all_reduce_bytes():
    assert all_reduce_bytes(100.0, 4) == 150


def test_fit_recovers_a_line_and_its_r2():
    sizes = np.array([1e3, 1e5, 1e6, 1e7])
    fit = fit_alpha_beta(sizes, 2e-5 + 3e-10 * sizes)
    np.testing.assert_allclose([fit.alpha, fit.beta, fit.r2], [2e-5, 3e-10, 1.0], rtol=1e-9)
    # Residuals +-1 around a flat line through 4 points: no slope explains them, R^2 = 0.
    flat = fit_alpha_beta([0, 1, 2, 3], [1, -1, -1, 1])
    np.testing.assert_allclose([flat.alpha, flat.beta, flat.r2], 0, atol=1e-12)


def test_fit_saa_recovers_three_constants():
    rng = np.random.default_rng(0)
    x, y = rng.uniform(1e4, 1e7, (2, 12))
    fit = fit_saa(x, y, 1e-4 + 2e-9 * x + 5e-10 * y)
    np.testing.assert_allclose([fit.alpha, fit.beta, fit.gamma], [1e-4, 2e-9, 5e-10], rtol=1e-6)


def test_fit_needs_different_sizes():
    with pytest.raises(UserError, match="a fit over size needs at least 2 measurements at different sizes, got 3"):
        fit_alpha_beta([5, 5, 5], [1, 2, 3])
    with pytest.raises(UserError, match="a fit over x and y needs at least 3"):
        fit_saa([1, 2, 3], [2, 4, 6], [1, 2, 3])


def test_parm_choice_by_hand():
    # a2a(4) = 1 + 2*4 = 9, gather(10) = 10, gather(2) = 2: s1 = 2*9 + 10 = 28, s2 = 9 + (9 + 2) = 20.
    a2a, gather = Fit(1.0, 2.0), Fit(0.0, 1.0)
    assert parm_choice((4, 4), 2, 10, a2a, gather)[:4] == ("s2", 28.0, 20.0, None)
    # With K f > 1 s2 gathers more than s1 and loses: gather(20) = 20 -> s2 = 9 + 29 = 38.
    assert parm_choice((4, 4), 20, 10, a2a, gather).schedule == "s1"
    # A measured SAA hides the gather: 1 + 2*4 + 0.1*20 = 11 -> s2 = 20.
    assert parm_choice((4, 4), 20, 10, a2a, gather, Fit(1.0, 2.0, 0.1))[:4] == ("s2", 28.0, 20.0, None)
    # Sent as a quarter of its bytes, a row leaves in 1 + 2 = 3. Of what remains s1 waits for its gather alone.
    assert parm_choice((1, 4), 2, 10, a2a, gather)[1:3] == (22.0, 14.0)
    assert parm_choice((4, 4), 2, 10, a2a, gather, waits=lambda seconds: max(seconds) - 9)[:3] == ("s2", 10.0, 2.0)


def test_fit_starts_at_zero_or_above():
    """Times that fall below nothing at size 0 give a line through zero: 20 / 10 of size 1 and 3."""
    fit = fit_alpha_beta([1.0, 3.0], [0.5, 6.5])
    assert fit.alpha == 0.0 and fit.beta == pytest.approx((1 * 0.5 + 3 * 6.5) / (1 + 9))
    fit = fit_saa([1.0, 2.0, 3.0], [1.0, 5.0, 2.0], [3.0, 4.0, 7.0])
    assert fit.gamma == 0.0 and fit.beta == pytest.approx(2.0)  # y alone would have a slope below zero


def test_split_saa_by_hand():
    # y = 2 x: of a slope of 5 per x the rounds take 3, so a gathered y costs (5 - 3) / 2 = 1; alpha is the whole one.
    assert split_saa(Fit(1.0, 3.0), Fit(4.0, 5.0, 0.0, 0.9), 2.0) == Fit(4.0, 3.0, 1.0, 0.9)


def test_overlap_bound_by_hand():
    # 3 s of transfers hide 1 s of matmuls: 4 s become 3; equal shares halve the time; with nothing to hide it stays.
    assert (overlap_bound(3, 1), overlap_bound(2, 2), overlap_bound(0, 5), overlap_bound(0, 0)) == (4 / 3, 2, 1, 1)


def test_bound_of_pairwise_by_hand():
    """D = Ng = 2, Ns = 2: per way 2 all-to-alls of 2*8*4*2 = 128 elements over the shards, as many steps of half of it
    between the groups, and a gather of 16*4 = 64 over N_MP = 2."""
    shape = LayerShape(tokens=16, model_dim=4, rows=8, ep_size=2, esp_size=2, mp_size=2, groups=2)
    load = ExpertLoad(flops=300.0, bytes=5.0)
    fits = {"permute:2x2": Fit(1.0, 1.0), "all_to_all:2": Fit(0.0, 3.0), "all_gather:2": Fit(0.0, 2.0)}
    fits |= {"expert_step": Fit(0.0, 2.0, 1.0)}
    predicted = pairwise_seconds(shape, load, Cluster(fits=fits, flops=1.0), item=1)
    assert predicted[:2] == (4 * (1 + 64) + 4 * 3 * 128 + 2 * 2 * 64, 2 * 300 + 5)
    assert (
        predicted.bound == (predicted.communication + predicted.experts) / max(predicted[:2])
        and 1 < predicted.bound < 2
    )
    # a preset without fits: what crosses links at W = 4 bytes/s, P = 100 FLOP/s
    flat = pairwise_seconds(shape, load, Cluster(flat=True, intra_bandwidth=4.0, flops=100.0), item=1)
    assert flat[:2] == ((4 * 64 + 4 * 128 / 2 + 2 * 32) / 4, 3.0)
    # two nodes: the ring's steps share a node's card, the rest takes the links inside
    nodes = pairwise_seconds(
        shape, load, Cluster(nodes=2, devices_per_node=2, intra_bandwidth=8.0, inter_bandwidth=4.0, flops=100.0), item=1
    )
    assert nodes[:2] == (4 * 64 * 2 / 4 + (4 * 128 / 2 + 2 * 32) / 8, 3.0)
    with pytest.raises(UserError, match="the bound of MoEConfig.schedule 'pairwise' needs Cluster.flops"):
        pairwise_seconds(shape, load, Cluster(flat=True, intra_bandwidth=4.0))

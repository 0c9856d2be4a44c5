"""Cluster files, absent figures, link traffic, the three all-to-alls, and fits with known answers."""

import pathlib
import re

import numpy as np
import pytest

from moe_jax.cluster import Cluster, Fit, Links, fit_alpha_beta, read_cluster
from moe_jax.cluster.fits import fit_layers
from moe_jax.cluster.layer_seconds import LayerShape, Transfer, carried, transfer_seconds
from moe_jax.errors import UserError

PRESETS = pathlib.Path(__file__).parents[2] / "configs" / "cluster"
NAMES = "parm_a parm_b johnny trevor johnny_measured trevor_measured hpwnv hpnv lpwnv hecate_a hecate_b".split()
NAMES += "h200 flat_3gbs_30tflops host_devices".split()
PAPERS = {  # nodes, devices a node, bytes/s between nodes, as the papers say
    "parm_b": (8, 4, 12.5e9),
    "johnny": (2, 8, 6.25e9),
    "trevor": (16, 4, 12.5e9),
    "hecate_a": (4, 8, 12.5e9),
    "hecate_b": (4, 8, 50e9),
}


def test_every_preset_ships_and_says_where_its_figures_come_from():
    assert sorted(path.stem for path in PRESETS.glob("*.gin")) == sorted(NAMES)
    for name in NAMES:
        cluster = read_cluster(PRESETS / f"{name}.gin")
        assert cluster.name == name
        assert cluster.source or name in ("flat_3gbs_30tflops", "host_devices")  # of no machine
        assert "absent" in (PRESETS / f"{name}.gin").read_text()
        if name in PAPERS:
            assert (cluster.nodes, cluster.devices_per_node, cluster.inter_bandwidth) == PAPERS[name]
    # data sheets, and Hecate, give both directions of NVLink together: the description of the same GPU has one
    for name, device in (("hecate_a", "v100"), ("hecate_b", "a100"), ("h200", "h200")):
        text = (PRESETS.parents[1] / "moe_jax" / "cluster" / "devices" / f"{device}.txt").read_text()
        both_ways = float(re.search(r"NVLink (\d+) GB/s both ways", text).group(1)) * 1e9
        one_way = float(re.search(r"^Target.intra_bandwidth = (\S+)", text, re.MULTILINE).group(1))
        assert read_cluster(PRESETS / f"{name}.gin").intra_bandwidth == one_way == both_ways / 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.gin", "Cluster.nodes = 2\nnodes = 3", r"c.gin:2: 'nodes = 3' is not a line 'Cluster.field = value'"),
        ("c.gin", "Cluster.flop = 1e12", r"Cluster has no field 'flop'; its fields are name, nodes"),
        ("c.gin", "Cluster.flops = -1.0", r"Cluster.flops \(-1.0\) must be above 0"),
        ("c.json", "[]", "c.json is not a calibration file"),
    ],
)
def test_wrong_files_are_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read_cluster(tmp_path / name)


def test_bandwidth_is_the_slow_links_and_an_absent_figure_names_its_requester():
    for name, bandwidth in (("flat_3gbs_30tflops", 3e9), ("johnny", 6.25e9), ("hecate_a", 12.5e9)):
        assert read_cluster(PRESETS / f"{name}.gin").bandwidth("test") == bandwidth
    with pytest.raises(UserError, match=r"the start needs Cluster.intra_latency, which cluster 'johnny' .* calibrate$"):
        read_cluster(PRESETS / "johnny.gin").need("intra_latency", "the start")


def test_the_slowest_link_of_the_tree_decides():
    # Two nodes of two. 0 -> 1 stays inside (5); 0 -> 2 (7) and 3 -> 1 (11) cross; 2 -> 2 moves nothing.
    pairs = np.zeros((4, 4))
    pairs[0, 1], pairs[0, 2], pairs[3, 1], pairs[2, 2] = 5, 7, 11, 100
    cluster = Cluster(nodes=2, devices_per_node=2, intra_bandwidth=8.0, inter_bandwidth=1.0)
    assert Links.of(cluster, 4, "test").exchange(pairs) == 11  # the node link: 11 / 1 > 16 / 8
    flat = Cluster(nodes=2, devices_per_node=2, intra_bandwidth=8.0, flat=True)
    assert Links.of(flat, 4, "test").exchange(pairs) == 2


def test_cards_and_switches_are_shared_links():
    # Two nodes of four devices; two cards and two sockets a node. 0 -> 4 and 1 -> 5 share card 0, 2 -> 6 has card 1;
    # 0 -> 2 (8 bytes) passes between the sockets.
    pairs = np.zeros((8, 8))
    pairs[0, 4], pairs[1, 5], pairs[2, 6], pairs[0, 2], pairs[0, 1] = 3, 4, 5, 8, 100
    links = {"nodes": 2, "devices_per_node": 4, "intra_bandwidth": 1000.0, "inter_bandwidth": 2.0, "cards_per_node": 2}
    cluster = Cluster(**links, switches_per_node=2, switch_bandwidth=4.0)
    assert Links.of(cluster, 8, "test").exchange(pairs) == 7  # card 0: 7 bytes at 2 / 2 a second
    slow = Cluster(**links, switches_per_node=2, switch_bandwidth=0.5)
    assert Links.of(slow, 8, "test").exchange(pairs) == 16  # 8 bytes at 0.5 a second
    # every device sends 12 bytes to its node and 2 to others: a switch passes 2 x 12 x 2/3 of them, a card 2 x 2
    assert Links(cluster, 8, 4, "test").uniform(12.0, 2.0) == 4
    assert Links(cluster, 8, 4, "test").uniform(12.0, 0.0) == 2 * 12 * 2 / 3 / 4
    # 14 bytes to each device, 2 from every other one: the same pairs by all three ways
    even = Links.of(cluster, 8, "test").received(np.full(8, 14.0))
    assert (
        even
        == Links.of(cluster, 8, "test").exchange(np.full((8, 8), 2.0))
        == Links(cluster, 8, 4, "test").uniform(6.0, 8.0)
    )
    # as many cards as devices: each has its own; with more it still reaches only one
    rails = Cluster(**{**links, "cards_per_node": 4})
    assert Links(rails, 8, 4, "test").uniform(0.0, 2.0) == 4
    assert Links(Cluster(**{**links, "cards_per_node": 8}), 8, 4, "test").uniform(0.0, 2.0) == 8
    # one of two groups that use the machines at the same time gets half
    assert Links(rails.part_of(2), 8, 4, "test").uniform(0.0, 2.0) == 8


def test_fit_recovers_its_constants_and_r2():
    sizes = np.array([1e3, 1e5, 1e6, 1e7])
    fit = fit_alpha_beta(sizes, 2e-5 + 3e-10 * sizes)
    np.testing.assert_allclose([fit.alpha, fit.beta, fit.r2], [2e-5, 3e-10, 1.0], rtol=1e-9)
    # Residuals +-1 around a flat line through 4 points: no slope explains them, R^2 = 0.
    flat = fit_alpha_beta([0, 1, 2, 3], [1, -1, -1, 1])
    np.testing.assert_allclose([flat.alpha, flat.beta, flat.r2], 0, atol=1e-12)
    rng = np.random.default_rng(0)
    x, y = rng.uniform(1e4, 1e7, (2, 12))
    fit = fit_alpha_beta(x, 1e-4 + 2e-9 * x + 5e-10 * y, y)
    np.testing.assert_allclose([fit.alpha, fit.beta, fit.gamma], [1e-4, 2e-9, 5e-10], rtol=1e-6)


def test_fit_needs_different_sizes():
    with pytest.raises(UserError, match="a fit over size needs at least 2 measurements at different sizes, got 3"):
        fit_alpha_beta([5, 5, 5], [1, 2, 3])
    with pytest.raises(UserError, match="a fit of layers needs at least 3 measurements, got 2"):
        fit_layers(["s1", "s1"], [1.0, 2.0], [1.0, 2.0], [1.0, 2.0])


def test_rounds_next_to_gathers_by_hand():
    """s2 with SAA on D = Ns = N_MP = 2 at 1 byte/s: 3 rounds and a gather start in 10 s each; 3/4 of 32 bytes leave,
    next to them half of the first 16 gathered ones, and then half of the last 16."""
    shape = LayerShape(schedule="s2", tokens=16, model_dim=4, rows=8, ep_size=2, esp_size=2, mp_size=2)
    moves = [Transfer("permute", "expert+expert_shard", 8, 3), Transfer("all_gather", "model", 16, 2)]
    flat = Cluster(flat=True, intra_bandwidth=1.0, intra_latency=10.0)
    assert transfer_seconds(moves, shape, flat, "test") == 3 * 10 + 24 + 8 + 10 + 8
    fits = {"saa:4,2,2": Fit(5.0, 1.0, 0.5)}
    assert transfer_seconds(moves, shape, Cluster(fits=fits), "test") == 5 + 32 + 0.5 * 32


def test_all_to_alls_by_hand():
    """16 devices on nodes of 4, groups of 2 that slice tensors and experts, 32 bytes sent in all by each device."""
    cluster = Cluster(
        devices_per_node=4, nodes=4, intra_latency=100, inter_latency=1000, intra_step=1, inter_step=10,
        intra_bandwidth=2, inter_bandwidth=2,
    )  # fmt: skip
    shape = LayerShape(tokens=0, model_dim=0, rows=0, ep_size=8, esp_size=2, mp_size=2, members_in_node=2)
    move, names = Transfer("all_to_all", "expert+expert_shard", 32), ("all_to_all", "two_level", "coordinated")
    seconds = {name: transfer_seconds(carried(move, shape, name), shape, cluster, "test") for name in names}
    assert seconds == {  # a device has half a byte a second to other nodes
        "all_to_all": 1000 + 3 + 120 + 48,
        "two_level": (100 + 3 + 12) + (1000 + 30 + 48),
        # 2 places in a node: 1 partner inside and 2 on each of 3 other nodes, 2 bytes each; 16 bytes in the group
        "coordinated": (1000 + 1 + 60 + 24) + (100 + 1 + 8),
    }

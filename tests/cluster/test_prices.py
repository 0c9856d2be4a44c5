"""The cost model against the tables that it was fitted to, and the basis of figures."""

import dataclasses
import importlib.util
import json
import pathlib

import pytest

from moe_jax.cluster import HOST, UNNAMED, Links, cluster_named, cluster_of, fits, read_cluster, write_cluster
from moe_jax.cluster.cluster import cluster_of_kind
from moe_jax.cluster.collectives import traffic
from moe_jax.cluster.prices import Prices
from moe_jax.cluster.targets import read_device
from moe_jax.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]
H100, A100 = read_device("h100"), read_device("a100")


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / "checks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_errors_on_rows_that_no_fit_saw_are_within_their_limits(capsys):
    assert script("prices").main() == 0 and '"missed": []' in capsys.readouterr().out


def test_a_published_step_is_priced_within_a_fifth(capsys):
    """What NeMo AutoModel measured on 8 H100, counted; at every level, with nothing hidden."""
    script("automodel").main()
    answer = json.loads(capsys.readouterr().out)
    assert all(0.8 <= answer[level]["over_measured"] <= 1.2 for level in fits.LEVELS)


def test_prices_by_hand():
    h100, a100 = Prices(H100), Prices(A100)
    # the largest matmul of the table runs at 780 TFLOP/s; without a table 0.7 of the data sheet
    assert h100.reached("bf16") == pytest.approx(780e12, rel=0.05)
    assert a100.matmul("bf16", 1, 4096, 4096, 4096) == pytest.approx(2 * 4096**3 / (0.7 * 312e12))
    # tokamax: 1,006 us forward, 750 of the banks' gradient; the fastest that is public, and no faster
    sizes = (131072, 2048, 768, 128)
    assert h100.grouped_matmul("bf16", "forward", *sizes) == pytest.approx(1006e-6, rel=0.1)
    assert h100.grouped_matmul("bf16", "drhs", *sizes) == pytest.approx(750e-6, rel=0.15)
    tf32 = h100.grouped_matmul("tf32", "forward", *sizes) / h100.grouped_matmul("bf16", "forward", *sizes)
    assert tf32 == pytest.approx(989 / 495)
    causal = h100.attention("forward", (4, 16, 4096, 128, 128), causal=True)
    assert causal == pytest.approx(531e-6, rel=0.15)
    assert 0.5 < causal / h100.attention("forward", (4, 16, 4096, 128, 128), causal=False) < 0.65
    assert a100.attention("forward", (4, 16, 4096, 128, 128), causal=True) == pytest.approx(
        2 * 4 * 16 * 4096**2 * 128 / (0.45 * 312e12)
    )
    assert h100.memory(1.0) == h100.assumed("launch") < Prices(H100, level="high").assumed("launch") == 5e-6
    assert h100.memory(3352.32e9 * 0.8) == pytest.approx(1.0)
    # what the user measured comes first, and says so
    own = Prices(H100, matmul_efficiency=0.5, launch=1e-6)
    assert own.matmul("bf16", 1, 4096, 4096, 4096) == pytest.approx(2 * 4096**3 / (0.5 * 989e12))
    assert own.assumed("launch") == own.launch == 1e-6
    bases = [prices.described()["matmuls (bf16)"] for prices in (own, h100, a100)]
    assert bases == ["calibrated", "measured (H100; cluster/measured)", "data sheet"]
    assert own.described()["other kernels"] == "data sheet x 0.8, launch 1 us, in part calibrated"
    assert h100.described()["exchanges between nodes"] == "data sheet x 0.86, start-up 45 us, assumed"


def test_a_node_takes_what_its_table_says():
    """Bytes Z of a program's collective over eight H100, and what a device sends of them for a planner."""
    prices, size = Prices(dataclasses.replace(H100, per_node=8)), 2.0**24
    for kind in ("all-to-all", "all-gather", "all-reduce", "reduce-scatter"):
        seconds = float(fits.fitted("collectives", ("H100",), kind)[8].seconds(size**0.5, size))
        assert traffic(kind, size, (tuple(range(8)),), prices)[2] == pytest.approx(seconds), kind
        sent = size * 7 / 8 * (2 if kind == "all-reduce" else 1)
        assert float(Links(cluster_of(prices), 8, 8, "test", kind).uniform(sent, 0.0)) == pytest.approx(seconds), kind
    # of an all-to-all of two a device sends half of Z, of a permute all of it
    pair = fits.fitted("collectives", ("H100",), "all-to-all")[2]
    assert traffic("collective-permute", size, ((0, 1), (1, 0)), prices)[2] == pytest.approx(
        pair.seconds((2 * size) ** 0.5, 2 * size)
    )


@pytest.mark.parametrize("kind", ["all-to-all", "all-gather", "all-reduce", "reduce-scatter"])
def test_groups_between_and_beyond_measured_ones(kind):
    """Seconds grow with the group; beyond the table start-ups go by rounds and bytes by what is sent."""
    lines = fits.fitted("collectives", ("B200",), kind)
    assert sorted(lines) == [2, 4, 8]
    times = [
        float(fits.collective_line(lines, members, kind).seconds(2.0**14, 2.0**28)) for members in (2, 3, 4, 6, 8, 16)
    ]
    assert times == sorted(times)
    beyond, last = fits.collective_line(lines, 64, kind), lines[8]
    assert beyond.alpha == pytest.approx(last.alpha * (9 if kind == "all-to-all" else 2))
    wide = dataclasses.replace(read_device("b200"), per_node=16)
    assert Prices(wide).described()["exchanges inside a node"].endswith("2 to 8; larger ones extrapolated by rounds")
    assert beyond.gamma == pytest.approx(last.gamma * (63 / 64) / (7 / 8))


def test_a_name_of_a_device_is_a_cluster(tmp_path, caplog):
    """In place of a file, in a file, and as the devices at hand; figures of the file stay."""
    named, at_hand = read_cluster("h200"), cluster_named("", "NVIDIA H200")
    assert (named.intra_bandwidth, named.flops) == (at_hand.intra_bandwidth, at_hand.flops)
    assert cluster_named("", "cpu") is HOST and named.prices.target.tables == ("H100",)
    path = tmp_path / "own.gin"
    path.write_text("Cluster.kind = 'h100'\nCluster.flops = 5e14\nCluster.cards_per_node = 1\n")
    own = read_cluster(path)  # what the file says stays, also where that is a field's default
    assert (own.flops, own.cards_per_node, own.memory_bytes, own.nodes) == (5e14, 1, 80e9, None)
    path.write_text("Cluster.inter_bandwidth = 1e9\nCluster.intra_bandwidth = 2e9\n")
    links = cluster_named(str(path), "NVIDIA H200")
    assert (links.flops, links.intra_bandwidth) == (named.flops, 2e9)
    assert "own.gin leaves out flops: those of h200 are taken" in caplog.text
    assert cluster_named(str(path), "cpu").flops == HOST.flops
    with pytest.raises(UserError, match=r"Cluster.kind \('h1'\) must be one of 2080ti"):
        cluster_of_kind("h1")
    path.write_text("Cluster.device = 'NVIDIA A100'\nCluster.intra_bandwidth = 600e9\n")
    read_cluster(path)
    read_cluster(path)
    assert caplog.text.count("is twice what a100 sends one way (3e+11); is it a two-way figure?") == 1
    assert (
        cluster_named("", "NVIDIA B9") is HOST and "'NVIDIA B9' has no prices here: those of host_devi" in caplog.text
    )
    calibrated = dataclasses.replace(UNNAMED, fits=(("call", (1.0, 0.0)),), device="gpu NVIDIA H100 80GB HBM3")
    write_cluster(calibrated, tmp_path / "own.json")
    cluster_named(str(tmp_path / "own.json"), "NVIDIA H200")
    assert "was calibrated on 'gpu NVIDIA H100 80GB HBM3', and the devices here are 'NVIDIA H200'" in caplog.text

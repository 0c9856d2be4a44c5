"""Fits from synthetic times are exact; a small real calibration writes a file that parm and the cost model read."""

import dataclasses
import itertools

import jax
import pytest

from moe_jax.analysis import calibrate as measure
from moe_jax.analysis.calibrate import CalibrationOptions, _cluster, calibrate
from moe_jax.analysis.timed import (
    Case,
    LayerCase,
    Timed,
    build_layer,
    layer_cases,
    machine_groups,
    mesh_groups,
    predict,
    schedules_of,
)
from moe_jax.cluster import Cluster, Fit, read_cluster, write_cluster
from moe_jax.cluster.layer_seconds import LayerShape, layer_seconds
from moe_jax.errors import UserError
from moe_jax.jobs.hosts import Hosts
from moe_jax.moe.choosers import parm_seconds, rule_of
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.schedule import LayerSizes, build_schedule
from moe_jax.parallel.mesh import MeshConfig, build_mesh


def test_groups_of_a_mesh_by_hand():
    # N_EP 2, N_ESP 4, N_MP 2 on eight devices: EP&ESP is all eight, EP pairs stand 4 apart.
    names = {timed.name for timed in mesh_groups(ep_size=2, esp_size=4, mp_size=2)}
    assert {"all_to_all:8", "all_to_all:2x4", "all_gather:2", "all_gather:4", "all_reduce:4", "saa:8,2,4"} <= names
    assert not any(name.endswith((":1", ":0")) for name in names)
    assert {"all_to_all:4", "permute:2x4"} <= names  # the groups of `pairwise`, each one member's shards
    # eight members on two nodes: its groups are the nodes
    assert {"all_to_all:4", "permute:2x4"} <= {timed.name for timed in mesh_groups(8, 1, 1, per_node=4)}
    # N_MP 8 over N_ESP 2 spans four EP members, which agree on the first
    assert "all_gather:4" in {timed.name for timed in mesh_groups(ep_size=4, esp_size=2, mp_size=8)}
    whole = set(machine_groups(8, 4))
    for mp_size, esp_size in itertools.product((1, 2, 4), repeat=2):
        assert set(mesh_groups(8 // esp_size, esp_size, mp_size, per_node=4)) <= whole
    assert Timed("permute", 2, 4) in whole  # the two nodes


def test_layers_of_a_machine_visit_every_pair():
    cases = layer_cases(8, None)
    assert {(case.mp_size, case.esp_size) for case in cases} == set(itertools.product((1, 2, 4), repeat=2))
    assert schedules_of(cases[0]) == ("deepspeed", "s1", "s2")
    assert layer_cases(8, MeshConfig(expert=2, expert_shard=2)) == []  # gradients would be summed


LINES = {"all_to_all": (1e-4, 2e-9), "all_gather": (3e-4, 1e-9)}


def test_calibrate_recovers_lines_from_synthetic_times(monkeypatch):
    """With a clock that follows known lines the fits are these lines, whatever an empty call costs."""
    empty = 5e-4

    def collective_cases(timed, devices, size):
        if timed.collective == "none":
            return [measure_case(0.0, 1, size)]
        alpha, beta = LINES.get(timed.collective, (2e-4, 3e-9))
        if timed.collective == "saa":
            whole, alone = (2e-3 + 2e-9 * size + 1e-9 * size, 1e-3 + 2e-9 * size)  # gathers have a start of their own
            return [measure_case(whole, 1, size, 2 * size), measure_case(alone, 1, size)]
        return [measure_case(alpha + beta * size, 4, size)]

    def measure_case(seconds, count, x, y=0):
        return Case(lambda: empty + count * seconds, count, x, y)

    def interleaved_seconds(calls, rounds):
        return {name: [call()] * rounds for name, call in calls.items()}

    monkeypatch.setattr(measure, "collective_cases", collective_cases)
    monkeypatch.setattr(measure, "interleaved_seconds", interleaved_seconds)
    options = CalibrationOptions(compute=False, devices_per_node=4)
    cluster, points = calibrate(jax.devices()[:8], options, Hosts())
    assert cluster.fit("call", "test").alpha == empty
    for name, fit in cluster.fits:
        if line := LINES.get(name.partition(":")[0]):
            assert (fit.alpha, fit.beta, fit.r2) == pytest.approx((*line, 1.0), rel=1e-6)
    saa = cluster.fit("saa:8,2,4", "test")
    assert (saa.alpha, saa.beta, saa.gamma) == pytest.approx((2e-3, 2e-9, 5e-10), rel=1e-6)
    # a node's link carries its four devices' messages at once
    assert cluster.inter_bandwidth == pytest.approx(4 / 3e-9) and cluster.intra_bandwidth == pytest.approx(1 / 3e-9)
    assert cluster.flops is None  # not timed, and not invented
    assert len(points) == len(cluster.fits) - 1


def test_small_calibration_serves_parm_and_reads_back(tmp_path):
    mesh = MeshConfig(expert=2, expert_shard=2, model=2)
    options = CalibrationOptions(largest=2**18, points=3, rounds=1, compute=False)
    devices = jax.devices()[:4]
    cluster, points = calibrate(devices, options, Hosts(), mesh)
    assert all(second >= 0 for found in points.values() for _, _, second in found)
    write_cluster(cluster, tmp_path / "cluster.json")
    again = read_cluster(tmp_path / "cluster.json")
    assert again == cluster and again.devices == 4
    sizes = LayerSizes(config=MoEConfig(num_experts=8, top_k=2), tokens=64, groups=4, row_bytes=256)
    seconds = parm_seconds(build_mesh(mesh, devices), sizes, again)
    assert seconds.keys() == {"s1", "s2"} and seconds["s1"] != seconds["s2"]


def test_a_step_is_what_each_message_of_an_all_to_all_adds_to_a_permute():
    """In a node of 4: 3 messages, 2 + 9 s and 2 s; across 2 nodes 1 message, 20 + 5 s and 20 s."""
    starts = {"permute:4": 2.0, "all_to_all:4": 11.0, "permute:2x4": 20.0, "all_to_all:2x4": 25.0}
    cluster = _cluster({name: Fit(alpha, 1e-9) for name, alpha in starts.items()}, jax.devices()[:8], 4)
    assert (cluster.intra_latency, cluster.intra_step) == (2, 3)
    assert (cluster.inter_latency, cluster.inter_step) == (20, 5)


def test_layer_seconds_by_hand():
    """s1 on D = 2, Ns = 2, N_MP = 2: per way 2 all-to-alls of x = 2*8*4*2 = 128 elements and a gather of 16*4 = 64."""
    shape = LayerShape(tokens=16, model_dim=4, rows=8, ep_size=2, esp_size=2, mp_size=2, top_k=1, experts=6)
    fits = {"all_to_all:4": (1.0, 1.0), "all_gather:2": (0.0, 10.0), "expert_step": (0.0, 2.0, 1.0)}
    fits |= {"gate": (0.0, 1.0), "regroup": (0.0, 1.0), "call": (7.0, 0.0)}
    predicted = layer_seconds(shape, (3.0, 5.0), Cluster(fits=fits))
    exchanges = 4 * (1 + 128) + (1 + 12 * 4)  # and one of counts: of 3 experts on 4 devices, of 4 bytes each
    # 11 s of experts, a gate of N / N_MP tokens, D C Ns rows that arrive, a call
    assert predicted == (exchanges + 2 * 10 * 64, 11, 8, 32, 7)
    # a layer that was timed whole starts in 70 s, and takes half of its communication and twice its computation
    whole = Cluster(fits={**fits, "layer:s1": (70.0, 0.5, 2.0)})
    assert layer_seconds(shape, (3.0, 5.0), whole) == (0.5 * predicted[0], 22, 16, 64, 70)
    with pytest.raises(UserError, match=r"needs Cluster.fits\['saa:4,2,2'\]"):
        s2 = dataclasses.replace(shape, schedule="s2", gates_group=True, cuts_buckets=True)
        layer_seconds(s2, (3.0, 5.0), Cluster(fits=fits))


def test_timed_layers_give_the_law_that_their_times_follow(monkeypatch):
    """Layers on a clock that takes a start, half of the predicted communication and twice the computation."""
    mesh = MeshConfig(expert=2, expert_shard=2, model=2)
    line = (1e-4, 1e-9)
    names = [timed.name for timed in mesh_groups(2, 2, 2) if timed.collective != "saa"]
    fits = {name: line for name in names} | {"saa:4,2,2": (1e-4, 1e-9, 1e-9), "call": (1e-4, 0.0)}
    fits |= {name: (2e-4, 3e-9, 1e-10) for name in ("gate", "regroup", "expert_step")}
    alone = Cluster(fits=fits)
    wanted = [(case, name) for case in layer_cases(4, mesh, 5) for name in schedules_of(case)]
    predicted = [predict(name, case, 4, alone) for case, name in wanted]
    monkeypatch.setattr(measure, "build_layer", lambda schedule, case, devices: (schedule, case))

    starts = {"deepspeed": 3e-3, "s1": 4e-3, "s2": 5e-3}

    def clock(calls, rounds):
        assert calls == [(name, case) for case, name in wanted]
        parts = [0.5 * t.communication + 2 * (t.experts + t.gate + t.rows) for t in predicted]
        return [starts[name] + seconds for (_, name), seconds in zip(wanted, parts, strict=True)]

    _, fits = measure.time_layers(jax.devices()[:4], CalibrationOptions(layers=5), mesh, alone, clock)
    assert sorted(fits) == [f"layer:{name}" for name in starts]
    for name, fit in fits.items():
        start = starts[name.removeprefix("layer:")]
        assert (fit.alpha, fit.beta, fit.gamma, fit.r2) == pytest.approx((start, 0.5, 2.0, 1.0), rel=1e-6)


def test_a_layer_is_built_and_runs():
    case = LayerCase(mp_size=2, esp_size=2, tokens=64, model_dim=16, hidden_dim=16, factor=1.0, top_k=1)
    y, (dx, *_) = build_layer("s1", case, jax.devices()[:4])()
    assert y.shape == dx.shape == (2 * 64, 16)  # two MP groups


EXCHANGES = {"all_to_all:8": (0, 1e-9), "all_gather:4": (0, 1e-9)}
PARTS = {name: (0, 0) for name in ("gate", "regroup", "expert_step", "call")}


def chosen(fits, capacity=None, top_k=2, gather="auto", **sizes):
    """Return (schedule, seconds of each, rule) on 8 devices, N_MP = 4."""
    roles = build_mesh(MeshConfig(expert=8, model=4), jax.devices()[:8])
    moe = MoEConfig(num_experts=8, top_k=top_k, gather=gather)
    layer = LayerSizes(config=moe, tokens=64, groups=1, capacity=capacity, row_bytes=256, **sizes)
    cluster = Cluster(fits=fits, flops=1.0)
    seconds = parm_seconds(roles, layer, cluster)
    return min(seconds, key=seconds.get), seconds, rule_of(cluster)


def test_parm_counts_the_gate_when_it_was_timed():
    """s2 gathers a quarter of s1's bytes here, but gates four times the tokens: with a slow gate s1 is right."""
    fits, small = {**EXCHANGES, "all_gather:4": (0, 1e-6), "saa:8,4,1": (0, 1e-9, 1e-6)}, {"capacity": 2, "top_k": 1}
    assert chosen(fits, **small)[::2] == ("s2", "equations")  # Parm's rule does not read the gate
    assert chosen({**fits, **PARTS, "gate": (0, 1.0)}, **small)[::2] == ("s1", "parts")


def test_file_of_another_machine_is_refused(tmp_path):
    write_cluster(Cluster(name="there", nodes=2, devices_per_node=2), tmp_path / "c.json")
    moe = MoEConfig(num_experts=8, top_k=2, cluster=str(tmp_path / "c.json"))
    roles = build_mesh(MeshConfig(expert=4, expert_shard=2, model=2), jax.devices()[:8])
    with pytest.raises(UserError, match=r"MeshConfig has 8 devices, but cluster 'there' has nodes \(2\) x .*\(2\) = 4"):
        build_schedule("parm", roles, LayerSizes(config=moe, tokens=64, groups=4))

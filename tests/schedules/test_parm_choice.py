"""`parm` without fits over all layers of Parm's table III: by the links of its larger testbed."""

import dataclasses
import itertools
import math
import pathlib

import pytest

from moe_jax.cluster import read_cluster
from moe_jax.moe.choosers import parm_seconds
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.schedule import LayerSizes
from moe_jax.parallel.mesh import MeshConfig, build_mesh

PRESETS = pathlib.Path(__file__).parents[2] / "configs" / "cluster"
TOP_K, PAIRS = 2, [(mp, esp) for mp in (2, 4) for esp in (1, 2, 4)]  # with N_MP = 1 the two schedules are one
TOKENS = [batch * length for batch in (2, 4, 8) for length in (512, 1024, 2048)]
DIMS, FACTORS = (1024, 2048, 4096), (1.2, 2.4)


def table(devices, factors=FACTORS):
    """Yield roles and sizes (rows of float32) of each layer; tokens are those of an MP group, E the devices.

    The hidden dim, of which the table has three, plays no part: each layer stands for three.
    """
    for mp, esp in PAIRS:
        config = MeshConfig(expert_shard=esp, model=mp, devices_per_node=min(4, devices)).resolve(devices)
        roles = build_mesh(config, devices)
        for tokens, dim, factor in itertools.product(TOKENS, DIMS, factors):
            capacity = 4 * math.ceil(factor * TOP_K * tokens / devices / 4)  # no part of a bucket is rounded up
            groups = devices // config.expert
            moe = MoEConfig(num_experts=devices, top_k=TOP_K)
            yield roles, LayerSizes(config=moe, tokens=tokens, groups=groups, capacity=capacity, row_bytes=4 * dim)


def chosen(layers, cluster, gather):
    schedules = []
    for roles, sizes in layers:
        config = dataclasses.replace(sizes.config, gather=gather)
        own = cluster.on_mesh(roles.mesh.size, roles.config.devices_per_node)
        seconds = parm_seconds(roles, dataclasses.replace(sizes, config=config), own)
        schedules.append(min(seconds, key=seconds.get))
    return schedules


@pytest.mark.parametrize(("inside", "across", "schedules"), [(None, None, {"s2"}), (14.1e-6, 18e-6, {"s1", "s2"})])
def test_by_links_s2_wins_where_its_gathers_hide(inside, across, schedules):
    """Testbed B, 8 nodes of 4: rows cross at 12.5 GB/s a node, an MP group gathers inside at 15.75 GB/s a device.

    Equations 13 and 14: s1 waits for a gather of N M bytes; s2 for the last of D gathers of E C M bytes, and for the
    rest where they and the rounds fill a device's link for longer than the card is busy. Bytes alone give s2 every
    layer; with start-ups (NCCL's, PCIe and network) the 31 rounds of SAA are too many for small layers.
    """
    cluster = dataclasses.replace(read_cluster(PRESETS / "parm_b.gin"), intra_latency=inside, inter_latency=across)
    layers = list(table(32))
    assert set(chosen(layers, cluster, "aas")) == {"s1"}
    got, want = chosen(layers, cluster, "saa"), []
    for roles, sizes in layers:
        row = sizes.row_bytes
        mp, esp = roles.config.model, roles.config.expert_shard
        y = 32 * sizes.capacity * row
        x = y * esp / mp
        card, device = x * (32 - 4) / 32 * 4 / 12.5e9, x * 31 / 32 / 15.75e9
        whole = (mp - 1) / mp * y / 15.75e9
        last = whole / roles.config.expert
        s1 = max(card, device) + (across or 0) + (mp - 1) / mp * sizes.tokens * row / 15.75e9 + (inside or 0)
        s2 = 31 * (across or 0) + max(card, device + whole - last) + last + (inside or 0)
        want.append("s1" if s1 <= s2 else "s2")
    assert got == want and set(got) == schedules

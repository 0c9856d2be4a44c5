"""The rounds of `balanced` in one kernel, interpreted, against the loops of the planner; tables are equal."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from moe_jax.analysis.compile_ahead import described_devices
from moe_jax.cluster.hlo import parse_module
from moe_jax.cluster.targets import parse_target
from moe_jax.cluster.timeline import play
from moe_jax.moe.after_gate_rules import ShareRule, edges_of
from moe_jax.moe.level_kernel import fits_one_kernel, level_in_one_kernel
from moe_jax.planning.balancer import NUMPY
from moe_jax.planning.shares import level_quotas

SWEEPS, NODE = 8, 4
LOADS = ("random", "equal", "unused", "none", "one")


def loops(totals, held, home):
    return level_quotas(NUMPY, totals[None], held[None], home[None], SWEEPS)[0]


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
    cases = [case(*sizes, kind, seed) for seed, kind in enumerate(LOADS * 2)]
    totals, held, home = (np.stack(of) for of in zip(*((c.sum(axis=0), *rest) for c, *rest in cases), strict=True))
    together = level_quotas(NUMPY, totals, held, home, SWEEPS)  # a layer's quotas depend on its own loads alone
    with jax.enable_x64(True):
        for at, (counts, held, home) in enumerate(cases):
            totals = counts.sum(axis=0)
            want, got = loops(totals, held, home), np.asarray(kernel(jnp.asarray(totals), held, home))
            np.testing.assert_array_equal(together[at], want)
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-10 * max(totals.max(), 1))
            edges = [np.asarray(edges_of(jnp.asarray(counts), jnp.asarray(q), home, 0, NODE)) for q in (want, got)]
            np.testing.assert_array_equal(*edges)
    counts, held, home = case(*sizes, "random", 0)
    totals = counts.sum(axis=0)
    got = kernel(jnp.asarray(totals, jnp.float32), held, home)  # as training runs
    np.testing.assert_allclose(got, loops(totals, held, home), rtol=0, atol=1e-5 * totals.max())


def test_what_registers_cannot_hold_stays_with_the_loops():
    assert fits_one_kernel(64, 32) and fits_one_kernel(128, 64) and not fits_one_kernel(128, 128)
    assert not fits_one_kernel(8, 256)  # [D, D] is the larger array
    held = np.ones((256, 256), bool)
    text = jax.make_jaxpr(ShareRule(sweeps=SWEEPS).quotas)(jnp.ones(256), jnp.asarray(held), jnp.eye(256, dtype=bool))
    assert "pallas_call" not in str(text)


@pytest.mark.gpu_compile
@pytest.mark.parametrize("device", ["a100", "h200"])
def test_a_gpu_runs_the_rounds_in_one_kernel(device):
    target = parse_target(f"{device}:1x1")
    sharding = SingleDeviceSharding(described_devices(target)[0])
    shapes = [((64,), jnp.float32), ((64, 32), bool), ((64, 32), bool)]
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]
    text = jax.jit(ShareRule(sweeps=SWEEPS).quotas).lower(*arguments).compile().as_text()
    timeline = play(parse_module(text), target)
    assert timeline.kernels <= 3 and " while(" not in text and not timeline.unknown_calls

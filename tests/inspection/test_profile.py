"""The profile for the compiler's scheduler: modelled seconds of all that is launched, by scheduling name."""

import re

import pytest
from support.toy import HEAD, LOOP, MODEL, TARGET

from moe_jax.analysis.compile_ahead import read_text
from moe_jax.cluster.hlo import parse_module
from moe_jax.cluster.targets import parse_target
from moe_jax.cluster.timeline import Model, scheduler_profile, unguided_share


def entries(text, model, target):
    costs, latencies = {}, {}
    for line in scheduler_profile(parse_module(text), target, model).splitlines():
        if found := re.fullmatch(r'costs \{ name: "([^"]+)" cost_us: (\d+\.\d{3}) \}', line):
            costs[found.group(1)] = float(found.group(2))
        else:
            found = re.fullmatch(r'latencies \{ source: "([^"]+)" target: "([^"]+)" latency_us: (\d+\.\d{3}) \}', line)
            latencies[found.group(1), found.group(2)] = float(found.group(3))
    return costs, latencies


def test_seconds_by_hand():
    """1,024 FLOPs at 64 a second take 16 s; 160 bytes, half of them, of two devices, at 10: 16 s.

    The loop runs both three times; what is free has no entry."""
    costs, latencies = entries(LOOP, MODEL, TARGET)
    assert costs == {"dot.1": 16e6, "all-to-all-start": 16e6, "while.1": 3 * 32e6}
    assert latencies == {("all-to-all-start", "all-to-all-done"): 16e6}


def test_names_are_those_of_the_scheduler():
    renamed = LOOP.replace('op_name="jit(f)/jvp(moe)/while/body/experts/dot_general"', 'scheduling_name="dot.7.clone"')
    costs, _ = entries(renamed, MODEL, TARGET)
    assert "dot.7.clone" in costs and "dot.1" not in costs


@pytest.mark.parametrize("name", ["expert_parallel", "replicas", "replicas-0.11.2", "replicas-0.12.0.1"])
def test_every_transfer_of_a_real_schedule_has_a_latency(name):
    text = read_text(f"{__file__.rpartition('/')[0]}/fixtures/{name}.hlo.xz")
    costs, latencies = entries(text, Model(), parse_target("h200:2x2"))
    starts = re.findall(r"%(\S+) = \S.* (?:all-to-all|all-reduce|all-gather|collective-permute|fusion)-start\(", text)
    module = parse_module(text)
    names = {i.scheduling_name for c in module.computations.values() for i in c.instructions if i.name in set(starts)}
    assert len(names) == len(starts) > 10
    assert {source for source, _ in latencies} == names <= set(costs)
    assert all(seconds > 0 for seconds in latencies.values())


def test_the_done_of_a_kernel_is_found_among_the_costs():
    """XLA looks there for it, unlike for a collective's, and reports it as missing from the profile else."""
    text = f"""{HEAD}%half (p: f32[8,10]) -> f32[4,10] {{
  %p = f32[8,10]{{1,0}} parameter(0)
  ROOT %s = f32[4,10]{{1,0}} slice(%p), slice={{[0:4], [0:10]}}
}}

ENTRY %main (x: f32[8,10]) -> f32[4,10] {{
  %x = f32[8,10]{{1,0}} parameter(0)
  %fusion-start = ((f32[8,10]{{1,0}}), f32[4,10]{{1,0}}, u32[]) fusion-start(%x), kind=kLoop, calls=%half
  ROOT %fusion-done = f32[4,10]{{1,0}} fusion-done(%fusion-start)
}}
"""
    costs, latencies = entries(text, MODEL, TARGET)  # 160 bytes read and as many written, 1,000 a second
    assert costs == {"fusion-start": 0.32e6, "fusion-done": 0.0}
    assert latencies == {("fusion-start", "fusion-done"): 0.32e6}


def test_unguided_share_is_that_of_the_seconds_without_a_name():
    module = parse_module(LOOP)
    profile = scheduler_profile(module, TARGET, MODEL)
    assert unguided_share(module, TARGET, profile, MODEL) == 0.0
    # of 16 s of the matmul, 16 s of the exchange and three times both: the loop has another name
    assert unguided_share(module, TARGET, profile.replace("while.1", "while.2"), MODEL) == pytest.approx(96 / 128)
    assert unguided_share(module, TARGET, "", MODEL) == 1.0

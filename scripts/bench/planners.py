"""Time every planner from 64 to 16,384 devices, and measure the memory that it needs.

    python scripts/bench/planners.py [--devices=64,256] [--experts=256] [--planners=balanced]

One layer, one flat group, 8 devices a node, 4 replica slots, Zipf-1 loads of 4,096 choices a source that differ by
source (int32), the default split; the experts are at home on every (D / E)-th device. A figure is of a fresh process
on one thread: its CPU seconds in `observe` and `propose`, and in `refine`, and the most memory that it held, loads
included. --experts=0 takes as many as devices. Prints rows of a table for docs/results.md.
"""

import dataclasses
import os
import resource
import subprocess
import sys
import time

import numpy as np
from absl import app, flags

from moe_jax.cluster import UNNAMED
from moe_jax.errors import UserError
from moe_jax.planning.balancer import names
from moe_jax.planning.config import PlannerConfig
from moe_jax.planning.cost import Cost, LayerPrices
from moe_jax.planning.hecate import Hecate
from moe_jax.planning.placement import Placement
from moe_jax.replan.session import PlanSession

_DEVICES = flags.DEFINE_list("devices", ["64", "256", "1024", "4096", "16384"], "Devices of the group.")
_EXPERTS = flags.DEFINE_integer("experts", 256, "Experts of the layer; 0: one for each device.")
_PLANNERS = flags.DEFINE_list("planners", [name for name in names() if name != "none"], "Planners.")
_TAU = flags.DEFINE_integer("overlap_degree", 16, "Experts that hecate may replicate.")
_ONE = flags.DEFINE_bool("one", False, "Set by this script: this process measures one figure.")


def zipf_loads(devices: int, experts: int) -> np.ndarray:
    """Draw loads int32 [1, S, E]: Zipf-1 popularity, times a Gamma of mean 1 for each source and expert."""
    rng, share = np.random.default_rng(0), 1 / np.arange(1, experts + 1)
    mean = 4096 * rng.permutation(share / share.sum())
    loads = np.empty((1, devices, experts), np.int32)
    for source in range(devices):
        loads[0, source] = rng.poisson(mean * rng.gamma(4.0, 0.25, experts))
    return loads


def measure(name: str, devices: int, experts: int) -> str:
    """Return 'propose s, refine s, GB' of one planner."""
    loads, flat = zipf_loads(devices, experts), dataclasses.replace(UNNAMED.sized(devices // 8, 8), flat=True)
    cost = Cost(prices=LayerPrices(cluster=flat, model_dim=4096, hidden_dim=2048), replica_slots=4)
    config = PlannerConfig(name=name, options=(Hecate(overlap_degree=_TAU.value),))
    session = PlanSession(config, Placement.even(1, experts, devices, 8), cost)
    times = [time.process_time()]
    session.predictor.observe(loads)
    for plan in (
        lambda: session.propose(1),
        lambda: session.planner.refine(loads, session.proposal.adopted, session.cost),
    ):
        plan()
        times.append(time.process_time())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return f"{times[1] - times[0]:.3f} + {times[2] - times[1]:.3f} s, {memory:.2f} GB"


def main(_):
    sizes = [(int(devices), _EXPERTS.value or int(devices)) for devices in _DEVICES.value]
    if _ONE.value:
        try:
            print(measure(_PLANNERS.value[0], *sizes[0]))
        except UserError as error:
            print(f"({error})")
        return
    print("| planner | " + " | ".join(f"D = {devices:,}" for devices, _ in sizes) + " |", flush=True)
    for name in _PLANNERS.value:
        cells = []
        for devices, experts in sizes:
            command = [sys.executable, __file__, "--one", f"--planners={name}", f"--devices={devices}"]
            command += [f"--experts={experts}", f"--overlap_degree={_TAU.value}"]
            done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=-1, stderr=-1, text=True)
            cells.append(done.stdout.strip() or done.stderr.strip().splitlines()[-1])
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    app.run(main)

"""Time every planner on synthetic loads and print microseconds per layer, then one JSON line.

    python scripts/bench/planners.py [--layers=24] [--repeats=3] [--planners=all]

Measures `propose` alone, without prediction and filling tables, for all layers at once, divided by the layers, on one
CPU process; the median of the repeats. The target is 1 ms a layer at 64 experts on 32 devices, 10 ms at 256 on 256.
There is no physical ceiling: host time is hidden as long as it is shorter than the step.
"""

import json
import platform
import time

import numpy as np
from absl import app, flags

from moe_jax.cluster import UNNAMED
from moe_jax.planning import NAMES
from moe_jax.planning.balancer import build_planner
from moe_jax.planning.config import PlannerConfig
from moe_jax.planning.cost import Cost
from moe_jax.planning.placement import Placement

SIZES = ((64, 32, 8, 1.0), (256, 256, 8, 10.0))  # experts, devices, devices per node, bar in ms

FLAGS = flags.FLAGS
flags.DEFINE_integer("layers", 24, "layers planned at once")
flags.DEFINE_integer("repeats", 3, "timed calls per planner; the median counts")
flags.DEFINE_list("planners", ["all"], "planner names, or all")


def skewed_loads(layers: int, devices: int, experts: int, seed: int) -> np.ndarray:
    """Draw loads [L, S, E] of 4,096 tokens a source with Zipf 1.2 popularity, shuffled in each layer."""
    rng = np.random.default_rng(seed)
    popularity = np.arange(1, experts + 1) ** -1.2
    loads = np.empty((layers, devices, experts), np.int64)
    for layer in range(layers):
        loads[layer] = rng.multinomial(4096, rng.permutation(popularity / popularity.sum()), size=devices)
    return loads


def time_planner(name: str, experts: int, devices: int, per_node: int) -> float:
    """Return milliseconds per layer of one propose, after one proposal that sets the placement in force."""
    cost = Cost(
        cluster=UNNAMED.sized(devices // per_node, per_node),
        model_dim=1024,
        hidden_dim=2048,
        replica_slots=4,
        overlap_degree=16,
    )
    planner = build_planner(PlannerConfig(name=name, bounded=False))
    placement = Placement.even(FLAGS.layers, experts, devices, per_node)
    placement = planner.propose(skewed_loads(FLAGS.layers, devices, experts, 0), placement, cost)
    times = []
    for repeat in range(FLAGS.repeats):
        loads = skewed_loads(FLAGS.layers, devices, experts, repeat + 1)
        began = time.perf_counter()
        planner.propose(loads, placement, cost)
        times.append(time.perf_counter() - began)
    return 1e3 * float(np.median(times)) / FLAGS.layers


def main(argv):
    del argv
    names = NAMES if FLAGS.planners == ["all"] else FLAGS.planners
    result: dict[str, dict[str, float]] = {}
    print(f"{'planner':20s}" + "".join(f"{f'E={e} D={d}, ms/layer (bar {bar:g})':>36s}" for e, d, _, bar in SIZES))
    for name in names:
        result[name] = {f"E{e}_D{d}": round(time_planner(name, e, d, per_node), 4) for e, d, per_node, _ in SIZES}
        print(f"{name:20s}" + "".join(f"{value:36.3f}" for value in result[name].values()), flush=True)
    within = all(result[name][f"E{e}_D{d}"] <= bar for name in result for e, d, _, bar in SIZES)
    machine = {"machine": platform.machine(), "python": platform.python_version(), "numpy": np.__version__}
    print(json.dumps({"layers": FLAGS.layers, "ms_per_layer": result, "within_bars": within, **machine}))


if __name__ == "__main__":
    app.run(main)

"""Replay planner and schedule `auto` beside every setting fixed for a whole trace, in modelled seconds.

    python scripts/bench/auto.py --out=DIR [--traces=top_1,W7_burst] [--cluster=configs/cluster/flat_3gbs_30tflops.gin]

Traces as `moe_jax.papers.loads` names them, fitted to --nodes x --devices_per_node devices, repeated to --steps steps.
Step s runs with what was planned from the loads up to s - 1, and takes the MoE layers' seconds by the one cost model;
of a trace that has two neighbouring steps at each sample the second is such a step, and the first is seen before it.
`auto` is plain until its first plan; a plan that needs a new program waits --compile_seconds in which the old one goes
on; homes that move are paid. A fixed setting compiles nothing, and begins with its first step. `auto` is followed for
--followed steps, and goes on as in their last repetition; fixed settings until their homes have moved once, likewise.
Prints a table and one JSON line, and writes that to DIR/bench_auto.json. NumPy alone; no device.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
import time

import numpy as np
from absl import app, flags

from moe_jax.analysis.simulate import judged, least_lag
from moe_jax.cluster import read_cluster
from moe_jax.cluster.layer_seconds import LayerShape, schedule_line
from moe_jax.observe.loads import LoadsTrace
from moe_jax.papers.loads import NAMES, find_loads, fit_loads
from moe_jax.planning.config import PlannerConfig
from moe_jax.planning.cost import Cost, LayerPrices, home_seconds
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import build_shape
from moe_jax.registry import PLANNERS
from moe_jax.replan.auto import AutoSession, Setting, build_settings, planners, step_seconds

_TRACES = flags.DEFINE_list("traces", list(NAMES), "Names of loads.")
_CLUSTER = flags.DEFINE_string("cluster", "configs/cluster/flat_3gbs_30tflops.gin", "Cluster file.")
_NODES = flags.DEFINE_integer("nodes", 2, "Nodes.")
_PER_NODE = flags.DEFINE_integer("devices_per_node", 4, "Devices of a node.")
_CHOICES = flags.DEFINE_integer("choices", 8192, "Choices of experts of one device in a layer.")
_SLOTS = flags.DEFINE_integer("replica_slots", 4, "The most replicas of a device in a layer; half and none too.")
_STEPS = flags.DEFINE_integer("steps", 100_000, "Steps that are counted.")
_LAYERS = flags.DEFINE_integer("layers", 4, "The trace's first layers, of which a step is made.")
_FOLLOWED = flags.DEFINE_integer("followed", 800, "Steps of `auto` that are followed one by one.")
_COMPILE = flags.DEFINE_float("compile_seconds", 60.0, "Seconds until a new program runs.")
_OUT = flags.DEFINE_string("out", None, "Folder for the JSON file.", required=True)
EXPERTS, MODEL_DIM, HIDDEN_DIM = 32, 1024, 2048


def build_cost(top_k: int) -> Cost:
    """Return the cost of a layer in float32, with a line for each schedule of an expert-parallel mesh."""
    cluster, devices = read_cluster(_CLUSTER.value).sized(_NODES.value, _PER_NODE.value), _NODES.value * _PER_NODE.value
    sizes = {"tokens": _CHOICES.value // top_k, "model_dim": 4 * MODEL_DIM, "rows": 1, "ep_size": devices}
    sizes |= {"members_in_node": _PER_NODE.value, "top_k": top_k, "experts": EXPERTS}
    groups = {"s1": 1, "pairwise": _NODES.value if _NODES.value > 1 else devices, "ring": 1}
    shapes = [LayerShape(schedule=name, groups=count, **sizes) for name, count in groups.items()]
    lines = tuple(schedule_line(shape, cluster) for shape in shapes)
    prices = LayerPrices(cluster=cluster, model_dim=MODEL_DIM, hidden_dim=HIDDEN_DIM, param_bytes=4)
    return Cost(prices=prices, replica_slots=_SLOTS.value, schedules=lines, schedule=lines[0].name)


def fixed_settings(config: PlannerConfig, start: Placement, cost: Cost) -> list[Setting]:
    """Return every planner x schedule x {0, half, all} slots, those too that `auto` knows to be plain."""
    found = build_settings(config, start, cost)
    for line in cost.schedules:
        own = dataclasses.replace(cost, replica_slots=0, schedule=line.name)
        there = {setting.names for setting in found}
        for name in planners(start.devices):
            planner = dataclasses.replace(PLANNERS[name].ahead_only(config), name=name, replica_slots=0)
            more = Setting(planner, start, own)
            found += [more] if more.names not in there else []
    return found


Step = tuple[list[tuple[np.ndarray, int]], np.ndarray]


def steps_of(trace: LoadsTrace) -> list[Step]:
    """Return of each step the loads [L, S, E] seen since the last one, with the steps before each, and its own."""
    lag = least_lag(trace.iterations)
    places, loads, found = judged(trace.iterations, lag).tolist(), trace.loads, []
    gap = int(np.diff(trace.iterations).max()) // lag
    for last, place in zip([places[-1], *places], places, strict=False):
        newest = [(loads[place - 1], gap)] if place - 1 != last else []
        found.append(([(loads[last], 1), *newest], loads[place]))
    return found


def run_fixed(setting: Setting, steps: list[Step]) -> dict[str, float]:
    """Return {split's name: seconds of all steps} of a setting that never changes."""
    plain, cost, period = setting.placement, setting.cost, len(steps)
    seconds, every = [], setting.planner.reshard_every
    repeats = 2 + -(-every // period)  # homes have been moved before the last
    for step in range(repeats * period):
        seen, now = steps[step % period]
        for loads, apart in seen if step else ():
            setting.observe(loads, apart)
        if step:
            setting.make_plans(step)
        seconds.append(setting.seconds(now) or [step_seconds(plain, now, cost, None)] * len(setting.splits))
    *early, last = np.array(seconds).reshape(repeats, period, -1).sum(axis=1)
    return dict(zip(setting.names, sum(early) + last * (_STEPS.value / period - len(early)), strict=True))


def run_auto(config: PlannerConfig, start: Placement, cost: Cost, steps: list[Step]) -> dict:
    """Return the seconds of `auto`, the settings it ran with, and what it cost the host."""
    session, period = AutoSession(config, start, cost), len(steps)
    running, ahead, under, ready_at = start, None, cost.schedule, None
    most = build_shape(start)
    seconds, clock, changes, host = [], 0.0, [], 0.0
    for step in range(_FOLLOWED.value // period * period):
        (seen, now), began, moves = steps[step % period], time.perf_counter(), 0.0
        for loads, apart in seen if step else ():
            session.observe(loads, apart)
        plan, setting = session.propose(step) if step else start, session.in_force
        host += time.perf_counter() - began
        homes = build_shape(plan.replace(replicas=None, shares=None, rule="home"))
        wanted = plan.program, setting.ahead
        same_homes = homes.home_slots <= most.home_slots and homes.bank_rows <= most.bank_rows
        if wanted == (running.program, ahead) and same_homes:
            ready_at = None
        elif ready_at is None or ready_at[1:] != wanted:
            ready_at = clock + _COMPILE.value, *wanted
            changes.append(f"{step}: {setting.names[session.current[1]]}")
        if ready_at is None or clock >= ready_at[0]:
            moves = float(home_seconds(plan.home, running.home, plan.devices, cost.prices).sum())
            running, ahead, under, ready_at = plan, setting.ahead, setting.cost.schedule, None
            most = most if same_homes else homes
        own = dataclasses.replace(cost, schedule=under)
        seconds.append(step_seconds(running, now, own, ahead) + moves)
        clock += seconds[-1]
    last = float(np.sum(seconds[-period:])) / period
    total = clock + last * (_STEPS.value - len(seconds))
    return {"seconds": total, "changes": changes, "host_seconds_per_step": host / len(seconds)}


def replay(name: str) -> dict:
    """Return one trace's row."""
    devices = _NODES.value * _PER_NODE.value
    trace, _ = fit_loads(find_loads(name), devices=devices, experts=EXPERTS, choices=_CHOICES.value)
    trace = trace._replace(loads=trace.loads[:, : _LAYERS.value])
    cost, config = build_cost(1 if name == "top_1" else 2), PlannerConfig(name="auto", replica_slots=_SLOTS.value)
    start = Placement.even(trace.loads.shape[1], EXPERTS, devices, _PER_NODE.value)
    steps = steps_of(trace)
    auto, fixed = run_auto(config, start, cost, steps), {}
    for setting in fixed_settings(config, start, cost):
        fixed |= run_fixed(setting, steps)
    best, plain = min(fixed, key=fixed.__getitem__), fixed["s1 none 0 plan"]
    ratios = {"over_best": auto["seconds"] / fixed[best], "over_plain": auto["seconds"] / plain}
    return {**auto, "best": best, "best_seconds": fixed[best], "plain_seconds": plain, **ratios, "fixed": len(fixed)}


def main(argv):
    del argv
    rows = {}
    titles = "".join(f"{title:>11}" for title in ("auto s", "best s", "over best", "over plain", "changes"))
    print(f"{'trace':24}{titles}  best fixed setting")
    for name in _TRACES.value:
        rows[name] = row = replay(name)
        cells = f"{row['seconds']:11.0f}{row['best_seconds']:11.0f}{row['over_best']:11.4f}{row['over_plain']:11.4f}"
        print(f"{name:24}{cells}{len(row['changes']):11}  {row['best']}", flush=True)
    answer = {"rows": rows, "cluster": _CLUSTER.value, "date": datetime.date.today().isoformat()}
    folder = pathlib.Path(_OUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench_auto.json").write_text(json.dumps(answer) + "\n", encoding="utf-8")
    print(json.dumps(answer))


if __name__ == "__main__":
    app.run(main)

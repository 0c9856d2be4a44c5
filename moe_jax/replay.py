"""Run planners over a recorded trace of expert loads, and compare them.

    python -m moe_jax.replay --trace=RUN
    python -m moe_jax.replay --trace=loads.npz --cluster=configs/cluster/flat_3gbs_30tflops.gin --planners=all \
        --nodes=4 --devices_per_node=4 --lag=1 --replica_slots=4 --out=DIR

RUN is a run folder: its loads.npz says M, F, dtype, mesh, devices of a node and the cluster that the run named, so no
other flag is needed; one that is given wins. Where the run named no cluster every device gets a link of 3 GB/s and
30 TFLOP/s, which is printed. A trace file without these figures needs --cluster.
Prints a table with its legend; --out gets all figures (replay.json). A user's mistake is one line, exit code 2.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
import subprocess
import sys

from absl import flags

from moe_jax.analysis import replay_inputs as inputs
from moe_jax.analysis import simulate
from moe_jax.config.command_line import parse_flags, run_command
from moe_jax.errors import UserError
from moe_jax.parallel.static_sizes import TransferShape
from moe_jax.planning.balancer import build_planner, names
from moe_jax.planning.config import PREDICTORS, PlannerConfig
from moe_jax.planning.cost import FORMS, PRICES
from moe_jax.planning.placement import Placement
from moe_jax.registry import load_plugins
from moe_jax.replan.auto import ROUND_STEPS

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "trace", None, "run folder, or npz with loads [steps, layers, sources, experts] and iterations [steps]"
)
flags.DEFINE_integer("segment", None, "number of the segment, from 0, where the model's layers differ")
flags.DEFINE_string("cluster", None, "cluster preset (.gin) or calibrate's file (.json); the run's when not given")
flags.DEFINE_list(
    "planners", ["all"], "planner names, NAME to plan ahead, NAME_after_gate to see the step itself; or all"
)
flags.DEFINE_integer("nodes", None, "nodes; those of --cluster, else of the trace, when not given")
flags.DEFINE_integer("devices_per_node", None, "devices of a node; as --nodes")
flags.DEFINE_integer("lag", None, "steps between the loads seen and the step planned for; the trace's fewest, else")
flags.DEFINE_integer("every", 1, "judge each so many-th sample that has another one `lag` steps before it")
flags.DEFINE_integer("replica_slots", 4, "mu: replicas of a device in one layer")
flags.DEFINE_multi_string(
    "gin_bindings", [], "Binding of a planner's own options, such as 'Hecate.shard_every = 10'; may repeat."
)
flags.DEFINE_integer("model_dim", None, f"M; the trace's when not given, else {inputs.LAYER['model_dim']}")
flags.DEFINE_integer(
    "hidden_dim", None, f"F of an expert; the trace's when not given, else {inputs.LAYER['hidden_dim']}"
)
flags.DEFINE_integer(
    "dtype_bytes",
    None,
    f"bytes of one number of the compute dtype, in which rows are priced even where a run sent them in float8; the "
    f"trace's when not given, else {inputs.LAYER['dtype_bytes']}, float32",
)
flags.DEFINE_integer(
    "sequence_length",
    None,
    "tokens of a sequence, where attention's time is modelled; the trace's when not given, else "
    f"{inputs.LAYER['sequence_length']}",
)
flags.DEFINE_enum("price", "executor", list(PRICES), "prices: what the program does, or the papers' formulas")
flags.DEFINE_enum("transfer", "auto", FORMS, "form of the transfer of replicas; auto: the cheaper one")
flags.DEFINE_integer("interval", None, "plan each so many iterations; the planner's own when not given")
flags.DEFINE_bool("must_pay", True, "replicas only where layers are predicted to take less time with them")
flags.DEFINE_bool("bounded", True, "keep to the replica slots where the original system has no such bound")
flags.DEFINE_enum("predictor", None, PREDICTORS, "how loads are guessed; the planner's own way when not given")
flags.DEFINE_string("out", None, "folder for replay.json; none: print only")


def _config() -> PlannerConfig:
    """Return what the flags say of the planners, with their own options as bound; `auto` reads those of all."""
    options = ()
    if FLAGS.gin_bindings:
        from moe_jax.config.gin_files import parse_run_config  # imports jax, which nothing else here needs

        bound = ["PlannerConfig.name = 'auto'", *FLAGS.gin_bindings]
        options = parse_run_config(gin_bindings=bound)[0].planner.options
    return PlannerConfig(
        replica_slots=FLAGS.replica_slots,
        interval=FLAGS.interval,
        predictor=FLAGS.predictor,
        transfer=FLAGS.transfer,
        must_pay=FLAGS.must_pay,
        bounded=FLAGS.bounded,
        split="plan",  # a trace's exchanges are timed by their exact rows
        options=options,
    )


def replay() -> dict:
    """Run the planners that the flags name; return the JSON answer."""
    config = _config()
    asked = list(dict.fromkeys(FLAGS.planners))
    if asked == ["all"]:  # every planner, and every one that can decide after the gate as such
        asked = [*names(), *(name + simulate.SUFFIX for name in names(after_gate=True))]
    for name in asked:
        simulate.split_name(name)
    if FLAGS.every < 1:
        raise UserError(f"--every ({FLAGS.every}) must be at least 1")
    given = inputs.build_inputs(FLAGS.flag_values_dict())
    steps, (samples, layers, sources, experts) = given.trace.iterations, given.trace.loads.shape
    least = simulate.least_lag(steps)
    lag = least if FLAGS.lag is None else FLAGS.lag
    count = len(simulate.judged(steps, lag)[:: FLAGS.every])
    placement = Placement.even(layers, experts, sources, given.cluster.devices_per_node)
    if FLAGS.transfer == "by_node":  # which nodes of one device, or one node, refuse
        TransferShape(devices=sources, devices_per_node=placement.devices_per_node, offers=1, slots=1, by_node=True)
    cost, modelled = inputs.layer_cost(given, PRICES[FLAGS.price], FLAGS.transfer, FLAGS.replica_slots)
    judged = (
        f"judged: {count} of {samples} samples, by plans from the loads of {f'{lag} steps' if lag > 1 else 'the step'}"
    )
    judged += " before" + f"; no samples are closer than {least} steps, and a run plans from 1 or 2" * (least > 1)
    for note in (judged, *given.messages, modelled):
        print(note, flush=True)
    every = dict.fromkeys(["none", *asked])  # plain EP is the base of RB and speed-up
    how = (given.trace, config, placement, cost, lag, FLAGS.every)
    records = {name: simulate.simulate(name, *how) for name in every}
    if "auto" in asked and count <= 2 * ROUND_STEPS:
        needs = f"it needs {2 * ROUND_STEPS}, two rounds, to choose"
        print(f"auto: {count} samples are too few, so it stays plain: {needs}")
    for name in asked:
        planner = build_planner(dataclasses.replace(config, name=simulate.split_name(name)[0]))
        if (remark := planner.remark(cost)) is not None:
            print(f"{name}: {remark}", flush=True)
    answer = {name: simulate.summarize(records[name], records["none"], cost) for name in asked}
    print(simulate.table(answer), flush=True)
    here = pathlib.Path(__file__).parent
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    model = ("model_dim", "hidden_dim", "top_k", "dtype_bytes", "activation", "expert_shards", "moe_every")
    return {
        "planners": answer,
        "trace": {"name": given.path.name, "shape": list(given.trace.loads.shape)},
        "model": {name: getattr(given, name) for name in model},
        "cluster": given.cluster.name,
        "lag": lag,
        "judged": count,
        "every": FLAGS.every,
        "date": datetime.date.today().isoformat(),
        "commit": git.stdout.strip() or None,
        "command": " ".join(["python -m moe_jax.replay", *sys.argv[1:]]),
    }


def command(argv: list[str]) -> None:
    """Carry out the command line."""
    parse_flags(argv, "moe_jax.replay", "trace")
    load_plugins()
    answer = replay()
    if FLAGS.out is not None:
        out = pathlib.Path(FLAGS.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "replay.json").write_text(json.dumps(answer) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(command)

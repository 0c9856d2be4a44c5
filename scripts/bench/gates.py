"""Train the demo with several gates, shared experts, other models' layers or float8; compare losses and steps to one.

    python scripts/bench/gates.py --out=runs/gates --seeds=3
    python scripts/bench/gates.py --out=runs/float8 --seeds=1 --base=bfloat16 --gin_bindings='train.steps = 80' \\
        --kinds='bfloat16,float8 dispatch'

What it says: held-out cross-entropy of the demo's model after equal steps on equal batches, once for each seed and kind
(below). A difference is that of two runs of one seed. `steps to topk's loss`: where a kind's held-out loss reaches what
--base (topk) ends with, plus --margin nats so that no noise at the end decides, over its own steps to there.
Runs are commands of the trainer in folders below --out, so a command that was stopped goes on where it was. Prints
Markdown, and writes losses.json to --out. On a CPU float8 is emulated: the same rounding, none of the speed.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from absl import app, flags
from held_out_curves import Curve, loss_cells, steps_to, train

_OUT = flags.DEFINE_string("out", None, "Folder of the runs and losses.json.", required=True)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each kind.")
_KINDS = flags.DEFINE_list("kinds", [], "Which kinds to train; all gates by default.")
_BASE = flags.DEFINE_string("base", "topk", "The kind that others are compared with, the first.")
_MARGIN = flags.DEFINE_float("margin", 0.1, "Nats above the last loss of --base to which steps are counted.")
_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "Binding of all runs; may repeat.")
_HOST_DEVICES = flags.DEFINE_integer("host_devices", 8, "Devices that the CPU is split into.")

_RESIDUAL = ["MoEConfig.top_k = 1", "MoEConfig.shared_experts = 1", "MoEConfig.renormalize = False"]
_NARROW = "ModelConfig.dtype = 'bfloat16'"
# kind: (run file, bindings)
GATES = {
    "topk": ("demo", []),
    "gshard": ("gshard", []),
    "gshard at capacity 0.6": ("gshard", ["MoEConfig.capacity_factor = 0.6"]),  # of FastMoE (papers/fastermoe.py)
    "base": ("base", []),
    "topology": ("topology", []),
    "sigmoid_bias": ("sigmoid_bias", []),
    "residual top-1": ("demo", _RESIDUAL),
    "residual top-1, learned mix": ("demo", [*_RESIDUAL, "MoEConfig.residual = 'learned'"]),
    "pr_moe": ("pr_moe", []),
    "deepseek_moe": ("deepseek_moe", []),
}
KINDS = {
    **GATES,
    "bfloat16": ("demo", [_NARROW]),
    "float8 dispatch": ("demo", [_NARROW, "MoEConfig.dispatch_dtype = 'float8_e4m3'"]),
}


def main(_) -> None:
    out = Path(_OUT.value)
    curves: dict[str, list[Curve]] = {}
    for seed in range(_SEEDS.value):
        for kind in _KINDS.value or GATES:
            file, bindings = KINDS[kind]
            folder = out / f"{kind.replace(',', '').replace(' ', '_')}_{seed}"
            bindings = [*_BINDINGS.value, *bindings, f"train.seed = {seed}"]
            run = train(folder, f"configs/run/{file}.gin", bindings, _HOST_DEVICES.value)
            curves.setdefault(kind, []).append(run)
    record = {"bindings": _BINDINGS.value, "curves": curves}
    (out / "losses.json").write_text(json.dumps(record, indent=1) + "\n")
    print(table(curves))


def table(curves: dict[str, list[Curve]]) -> str:
    """Return Markdown, one row for each kind."""
    base = _BASE.value
    rows = [
        f"| gate | held-out loss, nats per token | smallest to largest | below {base}, seed by seed | "
        f"steps to {base}'s loss, over {base}'s |",
        "|---|---|---|---|---|",
    ]
    for kind, runs in curves.items():
        cells = loss_cells(runs, None if kind == base else curves[base])
        ratios = [ratio_of_steps(run, other) for run, other in zip(runs, curves[base], strict=True)]
        reached = [ratio for ratio in ratios if ratio is not None]
        steps = "not reached"
        if len(reached) == len(ratios):
            steps = f"{statistics.mean(reached):.2f} ({min(reached):.2f} to {max(reached):.2f})"
        rows.append(f"| {kind} | {cells} | {steps} |")
    return "\n".join(rows)


def ratio_of_steps(run: Curve, base: Curve) -> float | None:
    """Return steps of `run` over those of `base` to what `base` ends with, and the margin; None: not reached."""
    goal = base[-1][1] + _MARGIN.value
    reached, own = steps_to(run, goal), steps_to(base, goal)
    return None if reached is None or own is None else reached / own


if __name__ == "__main__":
    app.run(main)

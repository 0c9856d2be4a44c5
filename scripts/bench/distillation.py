"""Train a student alone, with a teacher in all steps, and with a teacher that leaves; compare their held-out losses.

    python scripts/bench/distillation.py --out=runs/distillation --seeds=3
    python scripts/bench/distillation.py --out=runs/small --gin_bindings='train.steps = 90' --until=60

What it says: the held-out cross-entropy of the same student (configs/run/mos.gin) after equal steps on equal batches,
once for each seed; all seeds have one teacher (configs/run/mos_teacher.gin). A difference is that of two runs of one
seed. Runs are commands of the trainer in folders below --out, so a command that was stopped goes on where it was.
Prints Markdown, and writes losses.json and distillation.png to --out.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

from absl import app, flags

from moe_jax.observe import EVALUATIONS, read_metrics
from moe_jax.observe.figures import BLUE, GREEN, GREY, INK, ORANGE, new_figure, save_figure, style_axes, title_axes

_OUT = flags.DEFINE_string("out", None, "Folder of the runs, the table and the picture.", required=True)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Students of each kind.")
_UNTIL = flags.DEFINE_integer("until", 200, "Steps with the teacher where it leaves.")
_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "Binding of the teacher and of all students; may repeat.")
_HOST_DEVICES = flags.DEFINE_integer("host_devices", 8, "Devices that the CPU is split into.")
KINDS = {"alone": GREY, "taught in all steps": ORANGE, "staged": BLUE}


def main(_) -> None:
    out = Path(_OUT.value)
    teacher = train(out / "teacher", "configs/run/mos_teacher.gin")
    curves: dict[str, list] = {kind: [] for kind in KINDS}
    for seed in range(_SEEDS.value):
        for kind in KINDS:
            name = kind.replace(" ", "_")
            curves[kind].append(train(out / f"{name}_{seed}", "configs/run/mos.gin", *student(kind, seed, out)))
    record = {"teacher": teacher, "until": _UNTIL.value, "bindings": _BINDINGS.value, "students": curves}
    (out / "losses.json").write_text(json.dumps(record, indent=1) + "\n")
    print(table(curves, teacher))
    print(save_figure(picture(curves, teacher), out / "distillation.png"))


def student(kind: str, seed: int, out: Path) -> list[str]:
    """Return the bindings in which the students differ."""
    teacher = "" if kind == "alone" else str(out / "teacher")
    until = _UNTIL.value if kind == "staged" else None
    return [
        f"DistillationConfig.teacher = {teacher!r}",
        f"DistillationConfig.until = {until}",
        f"train.seed = {seed + 1}",  # 0 is the teacher's
    ]


def train(folder: Path, gin_file: str, *bindings: str) -> list[tuple[int, float]]:
    """Carry out one run, unless it is finished; return (step, held-out loss) of its evaluations."""
    command = [sys.executable, "-m", "moe_jax.train", f"--gin_file={gin_file}", f"--workdir={folder}"]
    command += [f"--host_devices={_HOST_DEVICES.value}"]
    command += [f"--gin_bindings={binding}" for binding in (*_BINDINGS.value, *bindings)]
    print(folder, file=sys.stderr, flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [(record["step"], record["held_out_loss"]) for record in read_metrics(folder, file_name=EVALUATIONS)]


def table(curves: dict[str, list], teacher: list) -> str:
    """Return Markdown: last held-out loss of each kind, mean and range over seeds, and against the same seed alone."""
    rows = [
        "| student | held-out loss, nats per token | smallest to largest | below the same seed alone |",
        "|---|---|---|---|",
    ]
    alone = last_losses(curves["alone"])
    for kind, runs in curves.items():
        last = last_losses(runs)
        gains = [a - b for a, b in zip(alone, last, strict=True)]
        below = "" if kind == "alone" else f"{statistics.mean(gains):.4f} ({min(gains):.4f} to {max(gains):.4f})"
        rows.append(f"| {kind} | {statistics.mean(last):.4f} | {min(last):.4f} to {max(last):.4f} | {below} |")
    return "\n".join([*rows, f"| the teacher | {teacher[-1][1]:.4f} | | |"])


def last_losses(runs: list) -> list[float]:
    return [run[-1][1] for run in runs]


def picture(curves: dict[str, list], teacher: list):
    """Draw held-out losses over the steps, mean and range over seeds, and each seed's gain over the student alone."""
    figure = new_figure(9.0, 4.0)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    for axes in (left, right):
        style_axes(axes)
    for kind, runs in curves.items():
        steps = [step for step, _ in runs[0]]
        losses = list(zip(*([loss for _, loss in run] for run in runs), strict=True))
        left.plot(steps, [statistics.mean(at) for at in losses], color=KINDS[kind], label=kind, linewidth=1.6)
        left.fill_between(steps, [min(at) for at in losses], [max(at) for at in losses], color=KINDS[kind], alpha=0.2)
    left.plot(*zip(*teacher, strict=True), color=GREEN, linewidth=1.0, linestyle=(0, (5, 3)), label="teacher")
    left.axvline(_UNTIL.value, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
    left.set_yscale("log")
    left.set(xlabel="step", ylabel="held-out loss, nats per token")
    left.legend(frameon=False, fontsize=8.5, labelcolor=INK)
    title_axes(left, "Held-out loss of the student")
    alone = curves["alone"]
    for kind in ("taught in all steps", "staged"):
        for run, other in zip(curves[kind], alone, strict=True):
            gains = [(step, b - a) for (step, a), (_, b) in zip(run, other, strict=True) if step]
            right.plot(*zip(*gains, strict=True), color=KINDS[kind], linewidth=1.2)
    right.axhline(0, color=GREY, linewidth=1.0)
    right.axvline(_UNTIL.value, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
    right.set(xlabel="step", ylabel="loss alone minus loss taught")
    title_axes(right, "Gain of each seed")
    return figure


if __name__ == "__main__":
    app.run(main)

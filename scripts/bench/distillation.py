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
from pathlib import Path

from absl import app, flags
from held_out_curves import Curve, draw_curve, loss_cells, train

from moe_jax.observe.report import BLUE, GREEN, GREY, INK, ORANGE, new_figure, save_figure, style_axes, title_axes

_OUT = flags.DEFINE_string("out", None, "Folder of the runs, the table and the picture.", required=True)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Students of each kind.")
_UNTIL = flags.DEFINE_integer("until", 200, "Steps with the teacher where it leaves.")
_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "Binding of the teacher and of all students; may repeat.")
_HOST_DEVICES = flags.DEFINE_integer("host_devices", 8, "Devices that the CPU is split into.")
KINDS = {"alone": GREY, "taught in all steps": ORANGE, "staged": BLUE}


def main(_) -> None:
    out = Path(_OUT.value)
    teacher = run(out / "teacher", "configs/run/mos_teacher.gin")
    curves: dict[str, list] = {kind: [] for kind in KINDS}
    for seed in range(_SEEDS.value):
        for kind in KINDS:
            name = kind.replace(" ", "_")
            curves[kind].append(run(out / f"{name}_{seed}", "configs/run/mos.gin", *student(kind, seed, out)))
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


def run(folder: Path, gin_file: str, *bindings: str) -> Curve:
    return train(folder, gin_file, [*_BINDINGS.value, *bindings], _HOST_DEVICES.value)


def table(curves: dict[str, list], teacher: list) -> str:
    """Return Markdown: last held-out loss of each kind, mean and range over seeds, and against the same seed alone."""
    rows = [
        "| student | held-out loss, nats per token | smallest to largest | below the same seed alone |",
        "|---|---|---|---|",
    ]
    for kind, runs in curves.items():
        rows.append(f"| {kind} | {loss_cells(runs, None if kind == 'alone' else curves['alone'])} |")
    return "\n".join([*rows, f"| the teacher | {teacher[-1][1]:.4f} | | |"])


def picture(curves: dict[str, list], teacher: list):
    """Draw held-out losses over the steps, mean and range over seeds, and each seed's gain over the student alone."""
    figure = new_figure(9.0, 4.0)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    for axes in (left, right):
        style_axes(axes)
    for kind, runs in curves.items():
        draw_curve(left, runs, KINDS[kind], kind)
    left.plot(*zip(*teacher[1:], strict=True), color=GREEN, linewidth=1.0, linestyle=(0, (5, 3)), label="teacher")
    left.axvline(_UNTIL.value, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
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

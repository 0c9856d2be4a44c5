"""Loss curves of the demo in bfloat16 beside float8: rows sent in float8, experts in float8, both.

Trains configs/run/demo.gin once for each kind, one after the other, from the same start on the same batches, and prints
a Markdown table of held-out losses. On a CPU float8 is emulated: the same rounding, none of the speed. A run that is
finished is not repeated; with --only one kind is trained, so that a long job can be cut into several.

  python scripts/bench/float8_curves.py --out=runs/float8 --steps=100
"""

from __future__ import annotations

import argparse
import pathlib

from held_out_curves import Curve, train

ROOT = pathlib.Path(__file__).parents[2]
E4M3 = "'float8_e4m3'"
KINDS = {
    "bfloat16": [],
    "float8 dispatch": [f"MoEConfig.dispatch_dtype = {E4M3}"],
    "float8 experts": [f"MoEConfig.expert_dtype = {E4M3}"],
    "float8 dispatch and experts": [f"MoEConfig.dispatch_dtype = {E4M3}", f"MoEConfig.expert_dtype = {E4M3}"],
}


def table(curves: dict[str, Curve]) -> str:
    """Return a Markdown table, a row per evaluation, of the losses and how far each lies above the first kind's."""
    base, *others = curves
    steps = [[step for step, _ in curve] for curve in curves.values()]
    assert all(row == steps[0] for row in steps), "kinds were evaluated at different steps"
    lines = ["| step | " + " | ".join(curves) + " |", "|---" * (1 + len(curves)) + "|"]
    for place, (step, loss) in enumerate(curves[base]):
        cells = [f"{curves[name][place][1]:.4f} ({curves[name][place][1] - loss:+.4f})" for name in others]
        lines.append(f"| {step} | " + " | ".join([f"{loss:.4f}", *cells]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the runs")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=25, help="steps between evaluations")
    parser.add_argument("--host_devices", type=int, default=8)
    parser.add_argument("--only", choices=KINDS, help="train this kind alone")
    args = parser.parse_args()
    common = ["ModelConfig.dtype = 'bfloat16'", f"train.steps = {args.steps}", f"train.evaluate_every = {args.every}"]
    curves = {}
    for name in [args.only] if args.only else KINDS:
        folder = args.out / name.replace(" ", "_")
        curves[name] = train(folder, str(ROOT / "configs/run/demo.gin"), [*common, *KINDS[name]], args.host_devices)
    print(table(curves))


if __name__ == "__main__":
    main()

"""Golden runs: five steps of each file in configs/run, compared with numbers that are kept, or with another commit.

    python scripts/golden.py                          # every run file against tests/golden/runs.json
    python scripts/golden.py hecate pr_moe            # some of them
    python scripts/golden.py --against=HEAD~1         # bit for bit against a commit, both run on this machine
    python scripts/golden.py --write                  # renew the JSON, where numbers change on purpose

Inputs: the run files as users start them, by `python -m moe_jax.train` on 8 host devices, in float32, on tests/golden/
text.txt. Outputs: of each step the loss and gradient norm (floats, exact in JSON) and the loads int [L, S, E], and exit
code 1 where one differs: by more than 1e-5 of the kept number (loads: at all), or by a bit of the other commit's.

`PlannerConfig.swap_after` is bound, so that a plan is used at a fixed step however long its program compiles, and
`must_pay`, so that replicas run whatever they cost a run so small. The
configurations of GPUs are shrunk by SHRUNK, and chat.gin reads that text too; the student of mos.gin learns from two
steps of mos_teacher.gin.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
STEPS = 5
TOLERANCE = 1e-5
# XLA:CPU compiles sooner and its code runs slower; the kept numbers are of these flags.
FLAGS = "--xla_backend_optimization_level=0"
BINDINGS = (
    "ModelConfig.dtype = 'float32'",
    "PlannerConfig.swap_after = 2",
    "PlannerConfig.must_pay = False",
    "train.batch_size = 16",
    "train.warmup_steps = 2",
    "train.checkpoint_every = 0",
    "train.evaluate_every = 0",
    "train.evaluate_windows = 8",
    "train.loads_every = 1",
    "train.log_every = 1",
)
# an auction turns on the last bits of scores, which are the processor's: compared by --against alone
UNKEPT = ("base",)
SHRUNK = {
    "chat": ("DataConfig.kind = 'text'",),
    "gpt_moe_s_h200": (
        "NUM_EXPERTS = 16",
        "ModelConfig.layers = 2",
        "ModelConfig.model_dim = 32",
        "ModelConfig.hidden_dim = 64",
        "ModelConfig.heads = 4",
        "ModelConfig.vocab_size = 264",
        "ModelConfig.max_length = 64",
        "ModelConfig.loss_chunk = 64",
        "DataConfig.sequence_length = 64",
        "MeshConfig.expert = 8",
        "MeshConfig.data = 1",
    ),
    "qwen3_30b_h100": (
        "MoEConfig.num_experts = 16",
        "MoEConfig.top_k = 6",
        "ModelConfig.layers = 2",
        "ModelConfig.model_dim = 32",
        "ModelConfig.head_dim = 8",
        "ModelConfig.heads = 4",
        "ModelConfig.kv_heads = 2",
        "ModelConfig.hidden_dim = 64",
        "ModelConfig.vocab_size = 264",
        "DataConfig.sequence_length = 64",
        "train.grad_accum_steps = 1",
        "MeshConfig.expert = 4",
        "MeshConfig.data = 2",
    ),
}


def names(unkept: tuple[str, ...] = UNKEPT) -> list[str]:
    """Return the names of all run files but those of `unkept`."""
    return sorted(path.stem for path in (ROOT / "configs" / "run").glob("*.gin") if path.stem not in unkept)


def train(tree: Path, name: str, folder: Path, *bindings: str):
    """Train the run file `name` of a checkout, by that checkout's code, into `folder`/`name`."""
    common = (f"DataConfig.path = {str(GOLDEN / 'text.txt')!r}", f"DataConfig.cache_dir = {str(folder / 'cache')!r}")
    command = [sys.executable, "-m", "moe_jax.train", f"--gin_file=configs/run/{name}.gin", "--host_devices=8"]
    command += [f"--gin_bindings={binding}" for binding in (*BINDINGS, *common, *SHRUNK.get(name, ()), *bindings)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    done = subprocess.run(
        [*command, f"--workdir={folder / name}"], cwd=tree, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{name} of {tree} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def run(tree: Path, name: str) -> dict:
    """Return {'loss': [5 floats], 'grad_norm': [5 floats], 'loads': [5][L][S][E]} of a run file in a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        folder, bindings = Path(folder), [f"train.steps = {STEPS}"]
        if name == "mos":
            train(tree, "mos_teacher", folder, "train.steps = 2")
            bindings += [f"DistillationConfig.teacher = {str(folder / 'mos_teacher')!r}"]
            bindings += [f"DistillationConfig.until = {STEPS - 1}"]
        train(tree, name, folder, *bindings)
        records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        with np.load(folder / name / "loads.npz") as arrays:
            loads = arrays["loads"]
    if not len(records) == len(loads) == STEPS:
        raise RuntimeError(f"{name}: {len(records)} records and {len(loads)} loads of {STEPS} steps")
    return {
        "loss": [record["loss"] for record in records],
        "grad_norm": [record["grad_norm"] for record in records],
        "loads": loads.tolist(),
    }


def differences(want: dict, got: dict, tolerance: float) -> list[str]:
    """Return a line for each kind of number that is further apart than `tolerance` of what is wanted; loads at all."""
    lines = []
    for key in ("loss", "grad_norm"):
        want_numbers, got_numbers = np.array(want[key]), np.array(got[key])
        apart = np.abs(got_numbers - want_numbers) / np.abs(want_numbers)
        if not np.all(apart <= tolerance):
            step = int(np.argmax(apart > tolerance))
            lines.append(f"{key} of step {step + 1}: {got_numbers[step]!r}, not {want_numbers[step]!r}")
    want_loads, got_loads = np.array(want["loads"]), np.array(got["loads"])
    if want_loads.shape != got_loads.shape:
        lines.append(f"loads are {list(got_loads.shape)}, not {list(want_loads.shape)}")
    elif (want_loads != got_loads).any():
        steps = np.flatnonzero((want_loads != got_loads).any(axis=(1, 2, 3))) + 1
        lines.append(f"loads differ at the steps {steps.tolist()}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="run files, without folder and ending; default: all")
    parser.add_argument("--against", default="", help="a commit to be equal to, bit for bit")
    parser.add_argument("--write", action="store_true", help="renew tests/golden/runs.json")
    args = parser.parse_args()
    path = GOLDEN / "runs.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder)
        if args.against:
            archive = subprocess.run(["git", "archive", args.against], cwd=ROOT, check=True, capture_output=True).stdout
            subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        for name in args.names or names(() if args.against else UNKEPT):
            got = run(ROOT, name)
            if args.write:
                kept[name] = got
                lines = [f"{json.dumps(run)}: {json.dumps(kept[run], separators=(',', ':'))}" for run in sorted(kept)]
                path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
                print(f"{name}: loss {got['loss'][0]:.4f} -> {got['loss'][-1]:.4f}", flush=True)
                continue
            if not args.against and name not in kept:
                print(f"{name}: not kept yet; python scripts/golden.py --write {name}", flush=True)
                failed = True
                continue
            want, tolerance = (run(other, name), 0.0) if args.against else (kept[name], TOLERANCE)
            lines = differences(want, got, tolerance)
            failed |= bool(lines)
            print(f"{name}: {'; '.join(lines) or 'equal'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

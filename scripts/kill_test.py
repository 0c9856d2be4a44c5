"""Kill a training run again and again (SIGKILL), resume it each time, and compare it with an undisturbed run.

    python scripts/kill_test.py --times=20 [--seed=0]

Each kill is one of three kinds, drawn in random order: while a checkpoint is being written (its unfinished folder is
seen, then up to 120 ms pass), while training (some steps later), or while the program starts. After each one, every
finished checkpoint must be readable, the newest must still be there, and the next start must resume at it. In the end
parameters and optimizer state must equal those of the undisturbed run bit for bit, and metrics.jsonl must hold each
step once, with the same losses. The answer is yes or no; there is no tolerance. Prints a table, then one JSON line;
exits 0 only if all of this holds. A kill costs one start of the program. If a run finishes before all kills were made
(on a busy machine a kill may come too late), it is compared, and the remaining kills are made on a run in a new folder.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from moe_jax.observe.metrics_file import read_metrics  # noqa: E402
from moe_jax.storage.checkpoint import Checkpointer  # noqa: E402
from moe_jax.storage.run_folder import RunFolder, environment_record  # noqa: E402

KINDS = ("saving", "training", "starting")
SAVE_EVERY = 3
TIMEOUT_SECONDS = 600
COLUMNS = ("while", "seconds", "resumed at", "reached", "newest", "unfinished")


class Run:
    """One work folder and the command that trains in it."""

    def __init__(self, base: pathlib.Path, name: str, options: argparse.Namespace, steps: int):
        self.folder = RunFolder(base / name)
        self.log = base / f"{name}.log"
        self.checkpoints = Checkpointer(self.folder.checkpoints, keep=3)
        bindings = [
            f"train.steps = {steps}", f"train.checkpoint_every = {SAVE_EVERY}", "train.keep_checkpoints = 3",
            "train.batch_size = 8", "train.warmup_steps = 5", "train.evaluate_windows = 8", "train.loads_every = 5",
            f"DataConfig.path = '{base / 'text.txt'}'", f"DataConfig.cache_dir = '{base / 'cache'}'",
            "DataConfig.sequence_length = 16", "DataConfig.held_out_fraction = 0.1",
            "ModelConfig.layers = 2", "ModelConfig.model_dim = 32", "ModelConfig.heads = 2",
            "ModelConfig.hidden_dim = 64", "MoEConfig.num_experts = 8", *options.gin_bindings,
        ]  # fmt: skip
        self.command = [sys.executable, "-m", "moe_jax.train", f"--workdir={self.folder.path}"]
        self.command += [f"--host_devices={options.host_devices}"]
        self.command += [f"--gin_file={name}" for name in options.gin_file]
        self.command += [f"--gin_bindings={binding}" for binding in bindings]

    def start(self) -> subprocess.Popen:
        """Start the command; its output goes to a log that begins anew."""
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        flags = re.sub(r"--xla_force_host_platform_device_count=\S+", "", os.environ.get("XLA_FLAGS", ""))
        environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        with open(self.log, "wb") as log:
            return subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=REPOSITORY)

    def finish(self) -> float:
        """Run the command to its end; return the seconds until the first step's metrics were there."""
        began, before, first = time.monotonic(), self.steps_done(), None
        process = self.start()
        while process.poll() is None:
            if first is None and self.steps_done() > before:
                first = time.monotonic() - began
            if time.monotonic() - began > TIMEOUT_SECONDS:
                process.kill()
            time.sleep(0.05)
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(self.command)}\nexited with {process.returncode}:\n{self.log.read_text()}")
        return first if first is not None else time.monotonic() - began

    def steps_done(self) -> int:
        """Return the number of complete lines in metrics.jsonl."""
        return self.folder.metrics.read_bytes().count(b"\n") if self.folder.metrics.exists() else 0

    def unfinished(self) -> set[str]:
        """Return the names of unfinished checkpoints."""
        folder = self.folder.checkpoints
        return {name for name in os.listdir(folder) if not name.isdecimal()} if os.path.exists(folder) else set()

    def newest(self) -> int | None:
        steps = self.checkpoints.steps()
        return steps[-1] if steps else None

    def resumed_at(self) -> int | None:
        """Return the step that the last start said it resumes at."""
        found = re.search(r"resuming at step (\d+)", self.log.read_text(errors="replace"))
        return int(found[1]) if found else None


def moment(run: Run, kind: str, rng: random.Random, startup_seconds: float):
    """Return is_due(seconds alive): whether the next start of the run is at the moment at which it is to be killed."""
    if kind == "saving":  # the unfinished folder of the first, second or third save is there
        left, seen, saves = run.unfinished(), set(), rng.randint(1, 3)

        def is_due(alive: float) -> bool:
            there = run.unfinished()
            left.intersection_update(there)  # what the last kill left goes with the first save, and may come again
            seen.update(there - left)
            return len(seen) >= saves

        return is_due
    changed = lambda: run.folder.metrics.stat().st_mtime_ns if run.folder.metrics.exists() else None  # noqa: E731
    steps, limit = (1, rng.uniform(0, startup_seconds)) if kind == "starting" else (rng.randint(1, 8), float("inf"))
    target, before = (run.newest() or 0) + steps, changed()
    # as long as this start has not touched metrics.jsonl, it holds steps that the last kill lost
    return lambda alive: alive > limit or changed() != before and run.steps_done() >= target


def kill_once(run: Run, kind: str, rng: random.Random, startup_seconds: float) -> dict | None:
    """Start the run, kill it at a moment of the given kind; return a row of the table, None if it finished before."""
    is_due = moment(run, kind, rng, startup_seconds)
    delay = 0.0 if kind == "starting" else rng.uniform(0, 0.12)
    began = time.monotonic()
    process = run.start()
    try:
        while process.poll() is None and not is_due(time.monotonic() - began):
            if time.monotonic() - began > TIMEOUT_SECONDS:
                raise SystemExit(f"a start of the run hangs:\n{run.log.read_text()}")
            time.sleep(0.001)
        time.sleep(delay)
        if process.poll() is not None:
            return None
    finally:
        process.kill()
        process.wait()
    seconds = round(time.monotonic() - began, 2)
    found = (kind, seconds, run.resumed_at(), run.steps_done(), run.newest(), len(run.unfinished()))
    print(*(f"{'-' if value is None else value!s:>{len(name)}}" for name, value in zip(COLUMNS, found, strict=True)))
    return dict(zip(COLUMNS, found, strict=True))


def faults_of(run: Run, kill: dict, newest_before: int | None) -> list[str]:
    """Return what is wrong after a kill: a checkpoint lost or unreadable, or a start from the wrong one."""
    faults = []
    if newest_before is not None and (kill["newest"] is None or kill["newest"] < newest_before):
        faults.append(f"the checkpoint of step {newest_before} is gone")
    if kill["resumed at"] is not None and kill["resumed at"] != newest_before:
        faults.append(f"resumed at {kill['resumed at']} although {newest_before} was finished")
    for step in run.checkpoints.steps():
        try:
            stored, arrays = run.checkpoints.read_host(step), run.checkpoints.read_arrays(step)
            if int(arrays["step"]) != step or not stored:
                faults.append(f"the checkpoint called {step} is of step {int(arrays['step'])}")
        except ValueError as error:
            faults.append(str(error))
    return faults


def differences(peaceful: Run, killed: Run, steps: int) -> list[str]:
    """Return what differs between the ends of the two runs; arrays are compared bit for bit."""
    found = []
    ends = [run.newest() for run in (peaceful, killed)]
    if ends != [steps, steps]:
        return [f"the runs end at the checkpoints {ends}, not at {steps}"]
    want, got = (run.checkpoints.read_arrays(steps) for run in (peaceful, killed))
    if sorted(want) != sorted(got):
        found.append("the checkpoints have other leaves")
    bits = lambda array: (array.dtype, array.shape, array.tobytes())  # noqa: E731
    found += [name for name in want if name in got and bits(want[name]) != bits(got[name])]
    want, got = (read_metrics(run.folder) for run in (peaceful, killed))
    if [line["step"] for line in got] != list(range(1, steps + 1)):
        found.append("metrics.jsonl does not hold each step once")
    elif [line["loss"] for line in got] != [line["loss"] for line in want]:
        found.append("metrics.jsonl has other losses")
    return found


def test(options: argparse.Namespace, base: pathlib.Path) -> dict:
    """Run everything in `base`; return the result as plain data."""
    rng = random.Random(options.seed)
    steps = options.steps or 12 + 8 * options.times
    (base / "text.txt").write_text(inspect.getsource(argparse) + inspect.getsource(subprocess))
    peaceful = Run(base, "peaceful", options, steps)
    startup_seconds = peaceful.finish()
    print(f"{steps} steps, a checkpoint every {SAVE_EVERY}; {startup_seconds:.1f} s from a start to its first step\n")
    print(*COLUMNS)
    kinds = [KINDS[i % len(KINDS)] for i in range(options.times)]
    rng.shuffle(kinds)
    kills, faults, runs = [], [], 0
    while len(kills) < len(kinds) and runs <= options.times:
        run, runs = Run(base, f"killed_{runs}", options, steps), runs + 1
        earlier = len(kills)
        for kind in kinds[earlier:]:
            newest_before, kill = run.newest(), kill_once(run, kind, rng, startup_seconds)
            if kill is None:
                break
            kills.append(kill)
            faults += faults_of(run, kill, newest_before)
        else:
            newest_before = run.newest()
            run.finish()
            if newest_before is not None and run.resumed_at() != newest_before:
                faults.append(f"the last start resumed at {run.resumed_at()}, not at {newest_before}")
        faults += differences(peaceful, run, steps)
        run.finish()
        if "finished already" not in run.log.read_text():
            faults.append("the same command on a finished run did not say so")
        print(f"run {runs} finished after {len(kills) - earlier} kills", flush=True)
    for line in faults:
        print(f"FAULT: {line}")
    return {
        "ok": not faults and len(kills) == options.times,
        "kills": len(kills),
        **{f"kills_while_{kind}": sum(kill["while"] == kind for kill in kills) for kind in KINDS},
        "kills_that_left_an_unfinished_checkpoint": sum(kill["unfinished"] > 0 for kill in kills),
        "faults": faults,
        "runs": runs,
        "steps": steps,
        "seed": options.seed,
    }


def main() -> int:
    """Parse flags, run the test in a temporary folder, print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="kills")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--steps", type=int, default=0, help="of the run; 0 takes 12 + 8 x times")
    parser.add_argument("--host_devices", type=int, default=8, help="devices that the CPU is split into")
    parser.add_argument("--gin_file", action="append", default=[], help="config file of the run; may repeat")
    parser.add_argument("--gin_bindings", action="append", default=[], help="further binding of the run; may repeat")
    parser.add_argument(
        "--workdir", default="", help="folder to work in, kept; default a temporary one, kept on a fault"
    )
    options = parser.parse_args()
    base = pathlib.Path(options.workdir or tempfile.mkdtemp(prefix="kill_test_")).absolute()
    base.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    result = test(options, base)
    result["seconds"] = round(time.monotonic() - began, 1)
    if result["ok"] and not options.workdir:
        shutil.rmtree(base)
    elif not result["ok"]:
        print(f"everything is kept in {base}")
    print(json.dumps({**result, **environment_record()}))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())

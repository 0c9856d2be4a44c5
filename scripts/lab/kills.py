"""Kill parts of a supervised job at random, in a lab of whole machines, and time how it comes back by itself.

    sudo python scripts/lab/kills.py --kills=30 --spares=1 --gin_file=configs/run/demo.gin

Three machines train (--hosts), more stand by (--spares). Each has its own network, processes and /dev/shm, which it
loses when it is killed. A kill is drawn from: a process that trains, process 0, a supervisor, a whole machine; while
steps are made or while a checkpoint is written; a second one may come before the first is mended (--double). The lab
plays the launcher: 20 s later it boots what was killed, or starts the supervisor that ended. Nothing else helps.

First the job runs undisturbed; then, in a new folder, with kills. Prints a line for each kill with the seconds of every
phase, then one JSON line with medians, and with the steps whose loss is not that of the undisturbed run: none where all
starts had one mesh; after a start on fewer machines ("meshes" names both) sums are rounded otherwise. Every start
compiles its programs; --xla_flags may let it do so sooner.

With --every=60 a kill comes every minute, mended or not, and the share of useful time is printed: steps of the final
history times the undisturbed median step, over wall clock.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import re
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from machines import Machine, children_of
from network import LabShape, build_network, find_missing, remove_leftovers, remove_network

from moe_jax.observe.metrics_file import read_metrics
from moe_jax.observe.run_folder import RunFolder, environment_record

ROOT = pathlib.Path(__file__).resolve().parents[2]
PORT = 8475
RETURN_SECONDS = 20.0
KINDS = ("process", "process 0", "supervisor", "machine")
MOMENTS = ("steps", "save")
PHASES = ("detection", "membership", "start", "restore", "program and step", "total")
TIMEOUT_SECONDS = 600
UNDISTURBED_STEPS = 500  # enough for a median, where no losses are compared
# What lines say, with the phase that they end; the first after a kill counts, in this order.
MARKS = (
    (re.compile(r"host \d+ (has closed|is silent)|its processes ended"), "detection"),
    (re.compile(r"supervisor .*: epoch (\d+): .* train, host"), "membership"),
    (re.compile(r"^mesh "), "start"),
    (re.compile(r"^resuming at step"), "restore"),
    (re.compile(r"supervisor .*: epoch \d+: step (\d+) is finished"), "program and step"),
)


class Lab:
    """A supervised job on machines, and its launcher."""

    def __init__(self, base: pathlib.Path, options: argparse.Namespace):
        self.base, self.options = base, options
        self.machines = [Machine(host) for host in build_network(LabShape(hosts=options.hosts + options.spares))]
        self.supervisors: dict[int, subprocess.Popen] = {}
        self.lines: list[tuple[float, int, str]] = []  # (when, machine, text), as they came
        self.due: dict[int, float] = {}  # when a machine's supervisor is started again
        self.workdir, self.bindings = base / "run", list(options.gin_bindings)
        self.secret = secrets.token_hex(32)
        for machine in self.machines:
            machine.boot()

    def start_job(self, name: str, steps: int = 0) -> None:
        """Start the supervisors of a new job, of so many steps where they are given."""
        self.workdir, self.lines, self.due, self.supervisors = self.base / name, [], {}, {}
        self.bindings = self.options.gin_bindings + [f"train.steps = {steps}"] * bool(steps)
        for index in range(len(self.machines)):
            self.start(index)

    def start(self, index: int) -> None:
        """Start a machine's supervisor, and boot the machine where it is dead."""
        options, machine = self.options, self.machines[index]
        if not machine.is_up:
            machine.boot()
        hosts = ",".join(f"{machine.host.address}:{PORT}" for machine in self.machines)
        command = [*machine.inside(), sys.executable, "-m", "moe_jax.supervise", f"--hosts={hosts}"]
        command += [f"--host_index={index}", f"--spares={options.spares}"]
        command += ["--start_timeout_seconds=60", "--"]  # one that returns after the job's end waits for the others
        command += [sys.executable, "-m", "moe_jax.train", f"--workdir={self.workdir}"]
        command += [f"--gin_file={path}" for path in options.gin_file]
        command += [f"--gin_bindings={binding}" for binding in self.bindings]
        environment = {**os.environ, "MOE_JAX_JOB_TOKEN": self.secret, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
        environment |= {"PYTHONPATH": str(ROOT), "XLA_FLAGS": options.xla_flags}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self.supervisors[index] = process
        threading.Thread(target=self._read, args=(index, process), daemon=True).start()

    def _read(self, index: int, process: subprocess.Popen) -> None:
        assert process.stdout is not None
        with process.stdout, open(self.base / f"{self.workdir.name}-{index}.log", "a") as log:
            for line in process.stdout:
                self.lines.append((time.time(), index, line.rstrip()))
                log.write(f"{time.time():.2f} {line}")
                log.flush()

    def launch(self) -> None:
        """Play the launcher: what ended comes back after a while."""
        for index, process in list(self.supervisors.items()):
            if index not in self.due and process.poll() not in (None, 0):
                self.due[index] = time.time() + RETURN_SECONDS
            if index in self.due and time.time() >= self.due[index]:
                del self.due[index]
                self.start(index)

    def is_done(self) -> bool:
        """Whether all supervisors have ended well; SystemExit where one says that starting again would not help."""
        codes = [process.poll() for process in self.supervisors.values()]
        if any(code in (2, 3) for code in codes):
            raise SystemExit("the job gave up:\n" + "\n".join(line for _, _, line in self.lines[-20:]))
        return all(code == 0 for code in codes)

    def wait(self, look, seconds: float = TIMEOUT_SECONDS):
        """Return what `look` returns once that is true or the job is done, and play the launcher meanwhile."""
        deadline = time.time() + seconds
        while not (found := look()) and not self.is_done():
            if time.time() > deadline:
                raise SystemExit("the job hangs:\n" + "\n".join(line for _, _, line in self.lines[-40:]))
            self.launch()
            time.sleep(0.02)
        return found

    def finish(self) -> None:
        """Wait until the job is done on all machines."""
        self.wait(lambda: False, 3 * TIMEOUT_SECONDS)

    def is_whole(self) -> bool:
        """Whether all machines are up, and as many as can train make steps."""
        formed = [when for when, _, line in list(self.lines) if MARKS[1][0].search(line)]
        if self.due or not formed or not self.said(MARKS[-1][0], formed[-1]):
            return False
        return len(self.training()) == self.options.hosts

    def said(self, pattern: re.Pattern, since: float) -> tuple[float, int, re.Match] | None:
        """Return the first line of any machine since a time that a pattern is found in: (when, machine, match)."""
        for when, index, line in list(self.lines):
            if when >= since and (match := pattern.search(line)):
                return when, index, match
        return None

    def training(self) -> list[int]:
        """Return the machines of the newest epoch, in the order of their processes."""
        found = [re.search(r"hosts ([\d, ]+) train", line) for _, _, line in list(self.lines)]
        newest = next(match for match in reversed(found) if match)
        return [int(word) for word in newest[1].split(", ")]

    def kill(self, kind: str, rng: random.Random) -> str:
        """Kill something of a kind on a machine that is up; return what, in words."""
        training = [index for index in self.training() if index not in self.due]
        index = training[0] if kind == "process 0" else rng.choice(training)
        [supervisor] = children_of(self.supervisors[index].pid)[:1] or [0]
        processes = children_of(supervisor)[:1]  # older than those that stand by
        if kind == "machine":
            self.machines[index].kill()
        elif kind == "supervisor" or not processes:
            kind = "supervisor"
            os.kill(supervisor, signal.SIGKILL)
        else:
            os.kill(processes[0], signal.SIGKILL)
        return f"{kind} on machine {index}"

    def close(self) -> None:
        for machine in self.machines:
            machine.kill()
        for process in self.supervisors.values():
            process.kill()
            process.wait()
        remove_network()


def mend(lab: Lab, killed: float) -> dict[str, float]:
    """Wait for the next finished step after a kill; return the seconds of each phase."""
    step = MARKS[-1][0]
    lab.wait(lambda: lab.said(MARKS[1][0], killed) and lab.said(step, lab.said(MARKS[1][0], killed)[0]))
    seconds, before = {}, killed
    for pattern, phase in MARKS:
        found = lab.said(pattern, before)
        if found:
            seconds[phase], before = found[0] - before, found[0]
    return {**seconds, "total": before - killed}


def moment(lab: Lab, kind: str, rng: random.Random) -> None:
    """Wait for a moment of a kind."""
    if kind == "steps":
        time.sleep(rng.uniform(0.5, 5.0))
    elif kind == "save":
        folder = lab.workdir / "checkpoints"  # an unfinished one that no earlier kill has left is there
        left = {path.name for path in folder.glob("*")}
        lab.wait(lambda: any(not p.name.isdecimal() and p.name not in left for p in folder.glob("*")), 120)


def kill_all(lab: Lab, options: argparse.Namespace) -> list[dict]:
    """Make all kills on a job that runs; return a row for each."""
    rng, rows = random.Random(options.seed), []
    lab.wait(lab.is_whole)
    while len(rows) < options.kills and not lab.is_done():
        kind, when = rng.choice(options.kinds), rng.choice(MOMENTS)
        moment(lab, when, rng)
        if lab.is_done():
            break
        killed = time.time()
        what = lab.kill(kind, rng)
        double = rng.random() < options.double
        if double:
            time.sleep(rng.uniform(1.0, 12.0))
            if lab.said(MARKS[1][0], killed):
                killed = time.time()
                what += f", then {lab.kill(rng.choice(options.kinds), rng)}"
        row = {"what": what, "during": when, "after_a_second_loss": double, **mend(lab, killed)}
        source = lab.said(re.compile(r"^resuming at step (.*)"), killed)
        row["resumed"] = source[2][1] if source else ""
        rows.append(row)
        shown = "  ".join(f"{row.get(phase, float('nan')):6.1f}" for phase in PHASES)
        print(f"{len(rows):3}  {shown}  {what}; during {when}; {row['resumed']}", flush=True)
        lab.wait(lab.is_whole)
    return rows


def kill_by_the_clock(lab: Lab, options: argparse.Namespace) -> float:
    """Make a kill every so many seconds, whatever the last one has left; return the seconds from the first step on."""
    rng = random.Random(options.seed)
    lab.wait(lab.is_whole)
    began = time.time()
    for count in range(1, options.kills + 1):
        lab.wait(lambda at=began + count * options.every: time.time() >= at)
        if lab.is_done():
            raise SystemExit(f"the job was done after {count - 1} kills; give it more train.steps")
        lab.kill(rng.choice(options.kinds), rng)
    lab.wait(lambda: time.time() >= began + (options.kills + 1) * options.every)
    return time.time() - began


def test(options: argparse.Namespace, base: pathlib.Path) -> dict:
    """Run everything in `base`; return the result as plain data."""
    lab = Lab(base, options)
    try:
        if not (base / "undisturbed").is_dir():
            lab.start_job("undisturbed", UNDISTURBED_STEPS if options.every else 0)
            lab.finish()
        median = statistics.median(line["step_seconds"] for line in read_metrics(RunFolder(base / "undisturbed")))
        lab.start_job("killed")
        if options.every:
            seconds = kill_by_the_clock(lab, options)
            steps = max(line["step"] for line in read_metrics(RunFolder(base / "killed")))
            share = {"steps": steps, "undisturbed_step_seconds": median, "useful_share": steps * median / seconds}
            return {"kills": options.kills, "every_seconds": options.every, "seconds_with_kills": seconds, **share}
        print("     " + "  ".join(f"{phase[:6]:>6}" for phase in PHASES) + "  seconds", flush=True)
        rows = kill_all(lab, options)
        lab.finish()
    finally:
        lab.close()
    wanted, got = (read_metrics(RunFolder(base / name, create=False)) for name in ("undisturbed", "killed"))
    differ = [b["step"] for a, b in zip(wanted, got, strict=True) if (a["step"], a["loss"]) != (b["step"], b["loss"])]
    single = [row for row in rows if not row["after_a_second_loss"]]
    medians = {phase: statistics.median([row[phase] for row in single if phase in row] or [0]) for phase in PHASES}
    return {
        "kills": len(rows),
        "median_seconds": {phase: round(seconds, 2) for phase, seconds in medians.items()},
        "longest_seconds": round(max((row["total"] for row in single), default=0.0), 2),
        "longest_after_a_second_loss": round(
            max((r["total"] for r in rows if r["after_a_second_loss"]), default=0.0), 2
        ),
        "steps": len(got),
        "steps_with_another_loss": differ,
        "meshes": sorted({text for _, _, text in lab.lines if text.startswith("mesh ")}),
        "rows": rows,
        "seed": options.seed,
    }


def main() -> int:
    """Parse flags, run the test, print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="how often something is killed")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed, and when")
    parser.add_argument("--hosts", type=int, default=3, help="machines that train")
    parser.add_argument("--spares", type=int, default=1, help="machines that stand by")
    parser.add_argument(
        "--double", type=float, default=0.1, help="share of kills with a second one before the next step"
    )
    parser.add_argument("--every", type=float, default=0.0, help="seconds between kills; 0 = once all is mended")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what is killed")
    parser.add_argument("--gin_file", action="append", default=[], help="config file of the run; may repeat")
    parser.add_argument("--gin_bindings", action="append", default=[], help="binding of the run; may repeat")
    parser.add_argument("--xla_flags", default="", help="XLA_FLAGS of the processes")
    parser.add_argument(
        "--workdir", default="", help="folder to work in, kept, as an undisturbed job in it; default temporary"
    )
    options = parser.parse_args()
    if missing := find_missing(shaped=False):
        print(f"error: {missing}", file=sys.stderr)
        return 2
    remove_leftovers()
    base = pathlib.Path(options.workdir or tempfile.mkdtemp(prefix="lab_kills_")).absolute()
    base.mkdir(parents=True, exist_ok=True)
    began = time.time()
    result = test(options, base)
    result["seconds"] = round(time.time() - began, 1)
    if not options.workdir:
        shutil.rmtree(base)
    print(json.dumps({**result, **environment_record()}))
    return 0 if result["kills"] == options.kills else 1


if __name__ == "__main__":
    sys.exit(main())

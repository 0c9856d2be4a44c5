"""Time DeepSpeed-MoE's schedule, s1 and s2 over a sweep of MoE layers, and judge the automatic choice between the two.

What it says: how much faster one layer's forward and backward is under Parm's schedules, by (N_MP, N_ESP). The sweep is
Parm's table III with tokens, M and F divided by 16 for this machine, and capacity factors 0.25 and 0.5 added, where s2
gathers less than s1. Eight devices, one data-parallel group, E = 8; K = 2, and 1 where the factor is below 1. The
all-reduce of gradients is left out, as in the paper. All schedules of a layer are timed in turn, medians count.

    python scripts/bench_schedules.py --out=DIR --host_devices=8 --seconds=420          # repeat until it says done
    python scripts/lab/cluster.py --hosts=2 --devices_per_host=4 --rate=500mbit -- \\
        python scripts/bench_schedules.py --out=DIR --place=lab --seconds=420
    python scripts/bench_schedules.py --out=DIR --cluster=cluster.json --report         # tables, plots, one JSON line

Rows are appended to DIR/PLACE.csv; what is there is not measured again. `parm` runs one of s1 and s2, so its
times are theirs: --report asks the calibration file which, and says how often each of `parm`'s two rules, equations 13
and 14 on fits of collectives and `layer_seconds`, names the shortest measured. s2 returns by SAA.
XLA_FLAGS=--xla_cpu_use_fusion_emitters=false halves the compile time.
"""

from __future__ import annotations

import concurrent.futures
import csv
import itertools
import pathlib
import statistics
import time

import numpy as np
from absl import app, flags

from moe_jax.analysis.timed import SCHEDULES, LayerCase, schedules_of
from moe_jax.config.command_line import define_job_flags

_OUT = flags.DEFINE_string("out", None, "Folder for CSV files, tables and plots.", required=True)
_PLACE = flags.DEFINE_enum("place", "host", ["host", "lab"], "Which sweep: one process, or two hosts of four devices.")
_SECONDS = flags.DEFINE_float("seconds", 1e9, "Start no further layer after so many seconds.")
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Interleaved rounds.")
_REPORT = flags.DEFINE_bool("report", False, "Read the CSV file and report; measures nothing.")
_CLUSTER = flags.DEFINE_string("cluster", None, "Calibration file of this place, for --report.")
_HOST_DEVICES = flags.DEFINE_integer("host_devices", None, "Devices that the CPU is split into.")
_JOB = define_job_flags()

# layers of each (N_MP, N_ESP); (1, 1) is left out: all schedules are the same program there
COUNTS = {
    "host": {(4, 4): 20, (2, 2): 16, (2, 4): 16, (4, 2): 16, (2, 1): 10, (4, 1): 10, (1, 2): 8, (1, 4): 8},
    "lab": {(4, 4): 8, (2, 2): 4, (2, 4): 4, (4, 2): 4, (2, 1): 3, (4, 1): 3, (1, 2): 2, (1, 4): 3},
}


def sweep(place: str) -> list[LayerCase]:
    """Return the layers of a place, pairs taking turns so that a part of the sweep is balanced too."""
    rng = np.random.default_rng(0)
    tokens = sorted({batch * length // 16 for batch in (2, 4, 8) for length in (512, 1024, 2048)})
    tokens = tokens[:-1]  # the longest layers would take seconds here
    by_pair = []
    for (mp_size, esp_size), count in COUNTS[place].items():
        chosen: list[LayerCase] = []
        for factor in itertools.islice(itertools.cycle((1.2, 0.25, 2.4, 0.5)), count):
            while True:
                top_k = 1 if factor < 1 else 2
                sizes = (int(rng.choice(tokens)), *(int(rng.choice((64, 128, 256))) for _ in range(2)))
                layer = LayerCase(mp_size, esp_size, *sizes, factor, top_k)
                if layer not in chosen:
                    break
            chosen.append(layer)
        by_pair.append(chosen)
    return [layer for turn in itertools.zip_longest(*by_pair) for layer in turn if layer is not None]


def read_rows(path: pathlib.Path) -> dict[LayerCase, dict[str, list[float]]]:
    """Return {layer: {schedule: seconds}} of a CSV file; {} where there is none."""
    if not path.exists():
        return {}
    found: dict[LayerCase, dict[str, list[float]]] = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            layer = LayerCase(
                *(float(row[field]) if field == "factor" else int(row[field]) for field in LayerCase._fields)
            )
            found[layer] = {name: [float(s) / 1e3 for s in row[f"{name}_ms"].split()] for name in SCHEDULES}
    return found


def measure(path: pathlib.Path) -> None:
    """Measure what the CSV file lacks, until the time is up."""
    from moe_jax.analysis.timed import build_layer, interleaved_seconds
    from moe_jax.jobs.start import start_hosts
    from moe_jax.parallel.mesh import set_up_devices

    began = time.monotonic()
    set_up_devices(_HOST_DEVICES.value)
    import jax

    with start_hosts(**{flag.name: flag.value for flag in _JOB}) as hosts:
        path.parent.mkdir(parents=True, exist_ok=True)
        todo = [layer for layer in sweep(_PLACE.value) if layer not in read_rows(path)]
        for index, layer in enumerate(todo):
            late = hosts.gather_text(f"layer {index}", str(time.monotonic() - began > _SECONDS.value))
            if late[0] == "True":
                break
            names, devices = schedules_of(layer), jax.devices()  # with N_MP = 1 s1 and s2 are one program
            # on several processes programs are compiled in one order everywhere
            with concurrent.futures.ThreadPoolExecutor(2 if jax.process_count() == 1 else 1) as pool:
                built = [pool.submit(build_layer, name, layer, devices) for name in names]
                calls = {name: future.result() for name, future in zip(names, built, strict=True)}
            seconds = interleaved_seconds(calls, _ROUNDS.value)
            seconds = {name: seconds.get(name, seconds["s1"]) for name in SCHEDULES}
            if hosts.is_main:
                fresh = not path.exists()
                with path.open("a", encoding="utf-8", newline="") as file:
                    writer = csv.writer(file)
                    if fresh:
                        writer.writerow([*LayerCase._fields, *(f"{name}_ms" for name in SCHEDULES)])
                    times = (" ".join(f"{1e3 * second:.2f}" for second in seconds[name]) for name in SCHEDULES)
                    writer.writerow([*layer, *times])
                shown = "  ".join(f"{name} {1e3 * statistics.median(seconds[name]):8.2f} ms" for name in SCHEDULES)
                print(f"{index + 1}/{len(todo)} {tuple(layer)}  {shown}", flush=True)
        else:
            if hosts.is_main:
                print("done: every layer of the sweep is measured", flush=True)


def main(_):
    path = pathlib.Path(_OUT.value) / f"{_PLACE.value}.csv"
    if not _REPORT.value:
        measure(path)
        return
    from bench.schedule_report import report

    report(path, read_rows(path), _CLUSTER.value)


if __name__ == "__main__":
    app.run(main)

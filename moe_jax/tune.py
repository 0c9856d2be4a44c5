"""Choose a run's settings by measuring on the machine at hand, and write them as a gin file.

    python -m moe_jax.tune --gin_file=configs/run/demo.gin --out=tuned.gin --host_devices=8

Times steps of a candidate against the best so far, binding by binding: schedule, transport, two halves, optimistic
steps, the guided scheduler, grouped matmul, rows of buckets, remat, stack, prefetch, microbatches; with --trace also
the planner. What the file binds may change too; what changes the mathematics (router, capacity, dtypes, batch size,
learning rate) does not, and a candidate whose first loss differs is left out. One process only.

A journal beside --out (tuned.journal.jsonl) keeps what was measured under machine, versions, commit and config: the
same command goes on where it was interrupted, and times nothing twice. A candidate is noted there before it runs, so
one that ends the process is 'crashed' for the next start, and left out; delete its line to try it again.
"""

from __future__ import annotations

import datetime
import functools
import json
import signal
from pathlib import Path

from absl import flags, logging

from moe_jax.config.command_line import define_config_flags, parse_flags, run_command
from moe_jax.errors import UserError

_GIN_FILES, _GIN_BINDINGS, _GIN_PATHS, _HOST_DEVICES = define_config_flags()
_OUT = flags.DEFINE_string("out", "tuned.gin", "File to write; it repeats what is bound, and binds what was chosen.")
_BUDGET = flags.DEFINE_float("budget_seconds", 1200, "Seconds to measure in, those of an interrupted command too.")
_TRACE = flags.DEFINE_string("trace", "", "Run folder or loads.npz: a planner is chosen by replaying these loads.")


def command(argv: list[str]) -> int:
    """Carry out the command line and return the exit code 0, or 130 after an interruption; errors are raised."""
    parse_flags(argv, "moe_jax.tune", "gin_file")
    logging.set_verbosity(logging.ERROR)
    from moe_jax.config.gin_files import parse_run_config
    from moe_jax.config.run_config import BOUND, bound_in, config_text, with_bindings

    config, text, _ = parse_run_config(_GIN_FILES.value, _GIN_BINDINGS.value, _GIN_PATHS.value)
    bound, out = bound_in(text), Path(_OUT.value)
    if not out.parent.is_dir():
        raise UserError(f"--out={out} lies in a folder that does not exist; make {out.parent} first")
    import jax

    from moe_jax.analysis import tuning
    from moe_jax.jobs.start import find_place
    from moe_jax.parallel.mesh import set_up_devices
    from moe_jax.storage.run_folder import write_atomically
    from moe_jax.training.compiling import set_up_compilation_cache

    if find_place((None, None, None))[0][1] != 1:
        raise UserError("moe_jax.tune runs in one process, and the environment names several; start it on one host")
    set_up_devices(_HOST_DEVICES.value)
    jax.config.update("jax_enable_x64", config.model.dtype == "float64")
    try:
        set_up_compilation_cache(None)
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # no backend, or a plugin of it that is missing
        why = " ".join(str(error).split()) or "no backend"
        raise UserError(f"jax finds no devices ({why}); --host_devices=8 takes the CPU") from error
    plain, candidates, gains = tuning.prepare(config, devices, _TRACE.value)
    print(
        "in this order: " + ", ".join(f"{name} ({gains[name]:.2g} s)" if name in gains else name for name in candidates)
    )
    key, path = tuning.journal_key(text, devices), out.with_suffix(".journal.jsonl")
    journal, bench = tuning.Journal(path, key, print), tuning.Bench(config, devices)
    for name in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs would ignore the first
        signal.signal(name, signal.default_int_handler)
    try:
        found = tuning.search(plain, candidates, bench, journal, _BUDGET.value, functools.partial(print, flush=True))
    except KeyboardInterrupt:
        print(f"interrupted; {path} keeps what was measured, and the same command goes on from there", flush=True)
        return 130
    print(f"{'seconds a step':>14}  {'to plain':>8}  setting")
    for setting, seconds, ratio, said in found["rows"]:
        numbers = f"{'-':>14}  {'-':>8}" if seconds is None else f"{seconds:14.4g}  {ratio:8.3f}"
        print(f"{numbers}  {setting}{f' ({said})' if said else ''}")
    best, answer = found["best"], found["answer"]
    gain = f"{tuning.text_of(best, plain)}: {answer['ratio']:.3f} of plain's seconds a step, {answer['rounds']} rounds"
    gain = gain if best != plain else "nothing beat plain, which this is"
    moved = ", ".join(f"{name} = {plain[name]!r}" for name in best if name in bound and best[name] != plain[name])
    marked = config_text(with_bindings(config, best), bound | best.keys()).splitlines()
    lines = [
        f"# {gain}",
        f"# {datetime.date.today()}: python -m moe_jax.tune {' '.join(argv[1:])}",
        *(f"# {name}: {json.dumps(value)}" for name, value in key.items() if value and name != "config"),
        f"# Bound by the run file, and changed here: {moved or 'nothing'}",
        *(line.removesuffix(BOUND) for line in marked if line.endswith(BOUND)),
    ]
    write_atomically(out, "\n".join(lines))
    print(f"{gain}\n{out} written; {journal.asked} of {len(journal.answers)} measurements are new")
    return 0


if __name__ == "__main__":
    run_command(command)

"""Choose a run's settings by measuring on the machine at hand, and write them as a gin file.

    python -m moe_jax.tune --gin_file=configs/run/demo.gin --out=tuned.gin --host_devices=8
    python -m moe_jax.tune --gin_file=configs/run/demo.gin --setting="ModelConfig.remat = 'dots'" --setting=...

Times steps of each --setting beside the fastest so far, on top of which it comes; without any, values of grouped
matmul, schedule, rows of buckets, remat, stack, optimistic steps, guided scheduler, two halves and microbatches. What
the file binds may change too; a setting whose first loss differs is left out. One process only.
"""

from __future__ import annotations

import datetime
import functools
from pathlib import Path

from absl import flags, logging

from moe_jax.config.command_line import define_config_flags, parse_flags, run_command
from moe_jax.errors import UserError

_GIN_FILES, _GIN_BINDINGS, _GIN_PATHS, _HOST_DEVICES = define_config_flags()
_OUT = flags.DEFINE_string("out", "tuned.gin", "File to write; it repeats what is bound, and binds what was chosen.")
_BUDGET = flags.DEFINE_float("budget_seconds", 1200, "Seconds after which no further setting is begun.")
_SETTINGS = flags.DEFINE_multi_string("setting", [], "Bindings to try, 'Name.field = value; ...'; may repeat.")


def command(argv: list[str]) -> None:
    """Carry out the command line."""
    parse_flags(argv, "moe_jax.tune", "gin_file")
    logging.set_verbosity(logging.ERROR)
    from moe_jax.config.gin_files import parse_run_config
    from moe_jax.config.run_config import BOUND, bound_in, config_text, with_bindings

    read = functools.partial(parse_run_config, _GIN_FILES.value, search_paths=_GIN_PATHS.value)
    (config, text), out, settings = read(_GIN_BINDINGS.value), Path(_OUT.value), []
    for lines in (setting.split(";") for setting in _SETTINGS.value):
        changed = read([*_GIN_BINDINGS.value, *lines])[0].by_name()
        names = [line.partition("=")[0].strip() for line in lines]
        settings.append({name: getattr(changed[name.split(".")[0]], name.split(".")[1]) for name in names})
    if not out.parent.is_dir():
        raise UserError(f"--out={out} lies in a folder that does not exist; make {out.parent} first")
    import jax

    from moe_jax.analysis.tuning import Bench, find_candidates, text_of
    from moe_jax.jobs.start import find_place
    from moe_jax.parallel.mesh import set_up_devices
    from moe_jax.storage.run_folder import write_atomically
    from moe_jax.training.compiling import set_up_compilation_cache

    if find_place((None, None, None))[0][1] != 1:
        raise UserError("moe_jax.tune runs in one process, and the environment names several; start it on one host")
    set_up_devices(_HOST_DEVICES.value)
    jax.config.update("jax_enable_x64", config.model.dtype == "float64")
    set_up_compilation_cache(None)
    settings, say = settings or find_candidates(config), functools.partial(print, flush=True)
    best, ratio = Bench(config, jax.devices()).search(settings, _BUDGET.value, say)
    gain = f"{text_of(best)}: {ratio:.3f} of plain's seconds a step" if best else "nothing beat the run as it is"
    marked = config_text(with_bindings(config, best), bound_in(text) | best.keys()).splitlines()
    lines = [line.removesuffix(BOUND) for line in marked if line.endswith(BOUND)]
    about = f"# {gain}\n# {datetime.date.today()}: python -m moe_jax.tune {' '.join(argv[1:])}"
    write_atomically(out, "\n".join([about, *lines]))
    print(f"{gain}\n{out} written")


if __name__ == "__main__":
    run_command(command)

"""`python -m moe_jax.train`: flags -> gin -> one run.

Exit codes: 0 finished, 2 a user's mistake, 3 a loss that is not finite, 4 a process of the job that was lost or stuck,
75 stopped by a signal after saving (--preempt_exit_code).
"""

from __future__ import annotations

from absl import flags, logging

from moe_jax.config.command_line import define_config_flags, define_job_flags, parse_flags, run_command
from moe_jax.errors import UserError

_GIN_FILES, _GIN_BINDINGS, _GIN_PATHS, _HOST_DEVICES = define_config_flags()
_OVERRIDE = flags.DEFINE_multi_string(
    "override", [], "Binding that a started run goes on with, such as 'train.learning_rate = 1e-4'; may repeat."
)
_WORKDIR = flags.DEFINE_string("workdir", "", "Run folder; the same command on the same folder resumes.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print config, mesh, parameters, bytes and FLOPs, then stop.")
_ALL = flags.DEFINE_bool("all", False, "With --dry_run: print the bindings that are defaults too.")
_TARGET = flags.DEFINE_string(
    "target", "", "With --dry_run: the GPUs it is for, DEVICE:NODESxDEVICES, such as h200:4x8."
)
_EVAL_ONLY = flags.DEFINE_bool("eval_only", False, "Only evaluate the last checkpoint of --workdir on held-out text.")
_INIT_FROM = flags.DEFINE_string("init_from", "", "Run folder whose parameters a new run starts from.")
_INIT_FROM_EMA = flags.DEFINE_bool("init_from_ema", False, "With --init_from: take its averaged parameters.")
_PLACE = define_job_flags()
_COMPILATION_CACHE = flags.DEFINE_string(
    "compilation_cache",
    None,
    "Folder that keeps compiled programs between starts; '' = none. Default: ~/.cache/moe_jax/compilation on GPUs, "
    "none on CPUs.",
)
_STALL_AFTER_SECONDS = flags.DEFINE_float(
    "stall_after_seconds",
    1800.0,
    "With several processes: end the job with exit code 4 after so many seconds without a step; 0 = never.",
)
_PREEMPT_EXIT_CODE = flags.DEFINE_integer("preempt_exit_code", 75, "Exit code after a signal to stop, and saving.")


def command(argv: list[str]) -> int:
    """Carry out the command line and return the exit code 0 or --preempt_exit_code; errors are raised."""
    parse_flags(argv, "moe_jax.train", "gin_file")
    logging.set_verbosity(logging.WARNING)  # orbax says much at INFO
    from moe_jax.config.gin_files import parse_run_config
    from moe_jax.config.run_config import bindings_as_begun, bound_in, overridden

    bindings = [*bindings_as_begun(_WORKDIR.value), *_GIN_BINDINGS.value]
    changed, given = overridden(_OVERRIDE.value), (_GIN_FILES.value, bindings, _GIN_PATHS.value)
    config, config_text = parse_run_config(*given, _OVERRIDE.value)
    if _DRY_RUN.value:
        from moe_jax.analysis.dry_run import dry_run

        print(dry_run(config, _HOST_DEVICES.value, _TARGET.value, bound_in(config_text), _ALL.value), end="")
        return 0
    if _TARGET.value:
        raise UserError(
            f"--target={_TARGET.value} needs --dry_run: a run takes the devices that it finds; python -m "
            "moe_jax.inspect compiles ahead of time for other devices"
        )
    if _EVAL_ONLY.value and _INIT_FROM.value:
        raise UserError(
            f"--init_from={_INIT_FROM.value} is for a run that trains; --eval_only evaluates the folder that --workdir "
            "names, which may be of a converted model"
        )
    if not _WORKDIR.value:
        raise UserError("--workdir is needed: the folder that the run is written to, such as --workdir=runs/try")
    import jax

    from moe_jax.jobs.start import start_hosts
    from moe_jax.parallel.mesh import set_up_devices
    from moe_jax.training.compiling import set_up_compilation_cache
    from moe_jax.training.run import Start, evaluate_run, run

    set_up_devices(_HOST_DEVICES.value)

    if config.model.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    place = {flag.name: flag.value for flag in _PLACE}
    with start_hosts(**place, stall_after_seconds=_STALL_AFTER_SECONDS.value) as hosts:
        set_up_compilation_cache(_COMPILATION_CACHE.value)
        if _EVAL_ONLY.value:
            evaluate_run(config, config_text, hosts, _WORKDIR.value)
            return 0
        start = Start(
            init_from=_INIT_FROM.value, init_from_ema=_INIT_FROM_EMA.value, gin_files=_GIN_FILES.value, changed=changed
        )
        finished = run(config, config_text, hosts, workdir=_WORKDIR.value, start=start)
    return 0 if finished else _PREEMPT_EXIT_CODE.value


if __name__ == "__main__":
    run_command(command)

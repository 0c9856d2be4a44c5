"""`python -m moe_jax.inspect`: what the GPU compiler schedules for a run, on a machine that has no GPU.

    python -m moe_jax.inspect --gin_file=configs/model/hecate_gpt_moe_s.gin --gin_bindings='train.batch_size = 256' \\
        --target=h200:4x8 --out=runs/inspect

prints, and writes to --out: report.json (memory, every collective, what computes next to it, modelled and exposed
time; the same with fewer cores next to transfers), trace.json (for ui.perfetto.dev) and schedule.hlo.gz (the program
as the compiler scheduled it). A target needs the CUDA wheels of jax: pip install 'jax[cuda13]'.
Without --target the devices of this machine are taken, and --profile puts measured times next to the modelled ones,
instruction by instruction, with the constants that would have fitted; --constants=FILE models with them.
Exit codes: 0, or 2 for a user's mistake.
"""

from __future__ import annotations

import datetime
import functools
import gzip
import json
import re
from pathlib import Path

from absl import flags, logging

from moe_jax.config.command_line import define_config_flags, parse_flags, run_command
from moe_jax.errors import UserError

PROFILED_STEPS = PLAIN_STEPS = 5

_GIN_FILES, _GIN_BINDINGS, _GIN_PATHS, _HOST_DEVICES = define_config_flags()
_TARGET = flags.DEFINE_string("target", "", "DEVICE:NODESxDEVICES, such as h200:4x8; '' takes this machine's GPUs.")
_OUT = flags.DEFINE_string("out", "", "Folder for report.json, trace.json and schedule.hlo.gz.")
_HLO = flags.DEFINE_string(
    "hlo",
    "",
    "Read this schedule.hlo.gz (or .xz, or text) instead of compiling; needs no CUDA wheels. With the config of its "
    "run loops over blocks of rows turn for the rows that are expected.",
)
_OPTIONS = flags.DEFINE_multi_string("compiler_option", [], "Option for the compiler, NAME=VALUE; may repeat.")
_PROFILE = flags.DEFINE_bool(
    "profile", False, "On real devices: record some steps, and compare measured with modelled times."
)
_CONSTANTS = flags.DEFINE_string(
    "constants",
    "",
    "JSON with the cost model's constants: report.json of --profile, gpu_day.json, or your own; names: "
    "matmul_efficiency, memory_efficiency, node_share (shares), launch, conditional, start, step, node_start, "
    "node_step (seconds).",
)
_RATES = flags.DEFINE_string("rates", "", "Without --target: DEVICE whose rates the model takes, if it cannot tell.")
_COMPLETE = flags.DEFINE_bool(
    "complete", False, "Of optimistic steps compile the complete program too, for what an overflow costs."
)
_SKEW = flags.DEFINE_float("skew", 1.0, "With a planner: it is shown loads that fall as rank to the power -skew.")


def command(argv: list[str]) -> None:
    """Carry out the command line."""
    parse_flags(argv, "moe_jax.inspect", "gin_file")
    logging.set_verbosity(logging.WARNING)
    if not _OUT.value:
        raise UserError("--out is needed: the folder that the report is written to, such as --out=runs/inspect")
    options = {}
    for text in _OPTIONS.value:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"xla_\w+", name):
            raise UserError(f"--compiler_option ({text!r}) is not xla_NAME=VALUE")
        options[name] = value
    if _HLO.value and not _TARGET.value:
        raise UserError("--hlo needs --target: DEVICE:NODESxDEVICES that the program was compiled for")
    if _TARGET.value and (_PROFILE.value or _HOST_DEVICES.value):
        raise UserError(
            "--profile and --host_devices need real devices; leave --target out to take those of this machine"
        )
    from moe_jax.analysis import compile_ahead
    from moe_jax.cluster.prices import Prices, read_constants
    from moe_jax.cluster.targets import device_named, parse_target, target_names
    from moe_jax.config.gin_files import parse_run_config
    from moe_jax.models.config import expert_counts
    from moe_jax.parallel.mesh import build_mesh
    from moe_jax.replan.segments import stated_buckets

    if _TARGET.value:
        target = parse_target(_TARGET.value)
    else:
        import jax

        if _HOST_DEVICES.value:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", _HOST_DEVICES.value)
        devices = jax.devices()
        kind, per_node = devices[0].device_kind, jax.local_device_count()
        name = _RATES.value or device_named(kind)
        if name is None:
            raise UserError(
                f"no GPU that is known here ({len(devices)} x {kind}); name a topology to compile for, such as "
                f"--target=h200:4x8, or with --rates={target_names()[0]} whose rates the model should take"
            )
        target = parse_target(f"{name}:{len(devices) // per_node}x{per_node}")
    text = compile_ahead.read_text(_HLO.value) if _HLO.value else None
    prices = Prices(target, **(read_constants(_CONSTANTS.value) if _CONSTANTS.value else {}))
    config = None
    if text is None or _GIN_FILES.value or _GIN_BINDINGS.value:  # of a saved schedule the run that it is of
        config = parse_run_config(_GIN_FILES.value, _GIN_BINDINGS.value, _GIN_PATHS.value)[0]
        config = compile_ahead.on_target(config, target)
    if text is not None:
        buckets = ()
        if config is not None:  # nothing but the number and rates of the devices is needed
            experts = expert_counts(config.model, config.moe)
            roles = build_mesh(config.mesh, target.devices, experts, target.device_kind)
            buckets = stated_buckets(config, roles, compile_ahead.planned_shapes(config, roles, _SKEW.value))
        write_report(text, prices, buckets)
        return
    if _TARGET.value:
        devices = compile_ahead.described_devices(target)
    inspect_devices(config, devices, prices, options)


def inspect_devices(config, devices, prices, options: dict[str, str]) -> None:
    """Compile the run's step for these devices, report it, and with --profile run it.

    Args:
      config: see `compile_ahead.on_target`; options: of the compiler.
    """
    from moe_jax.analysis.compile_ahead import compile_step
    from moe_jax.analysis.measured import add_measured, read_spans, record_steps
    from moe_jax.analysis.program_report import report_text

    compile_it = functools.partial(compile_step, config, devices, skew=_SKEW.value, options=options)
    compiled, rest = compile_it(real=not _TARGET.value), None
    if _COMPLETE.value and compiled.common:
        rest = compile_it(real=not _TARGET.value, complete=True)
    report, module = write_report(compiled.text, prices, compiled.buckets, compiled, rest)
    if _PROFILE.value:
        out = Path(_OUT.value)
        seconds = record_steps(config, devices, compiled, out / "profile", PROFILED_STEPS, PLAIN_STEPS)
        spans = read_spans(out / "profile", module.name)
        report = add_measured(report, module, prices, spans, PROFILED_STEPS, seconds)
        (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(report_text(report), end="")


def write_report(text: str, prices, buckets=(), compiled=None, complete=None):
    """Model a schedule, print the report and fill the folder; return the report and the program (`Module`).

    Args:
      buckets: of the program, () where they are not known.
      compiled: what the text is of, None for a saved one, of which it is not known what overflows cost.
      complete: the complete program next to a common one, None where it was not compiled.
    """
    from moe_jax.analysis import program_report
    from moe_jax.analysis.compile_ahead import without_places
    from moe_jax.cluster.hlo import parse_module
    from moe_jax.cluster.timeline import play
    from moe_jax.storage.run_folder import disk_errors_named, environment_record

    module = parse_module(text, buckets)
    timeline = play(module, prices)
    facts = {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    if compiled is not None:
        facts |= {
            "environment": environment_record(mesh=compiled.mesh),
            "bindings": [*_GIN_FILES.value, *_GIN_BINDINGS.value],
            **{name: getattr(compiled, name) for name in ("lower_seconds", "compile_seconds")},
            "compiler_options": compiled.options,
            "guided_scheduler": compiled.guided,
            "program": "common" if compiled.common else "complete",
            **{name: getattr(compiled, name) for name in ("resolved", "memory", "model_flops")},
        }
    facts |= program_report.what_if(module, prices)
    if compiled is not None and compiled.common:
        rest = None if complete is None else play(parse_module(complete.text, complete.buckets), prices)
        facts["overflow"] = program_report.overflow_record(timeline, buckets, rest)
        if complete is not None:
            facts["overflow"]["complete_compile_seconds"] = complete.compile_seconds
    report = program_report.build_report(timeline, prices, facts)
    out = Path(_OUT.value)
    with disk_errors_named(out):
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (out / "schedule.hlo.gz").write_bytes(gzip.compress(without_places(text).encode(), mtime=0))
        program_report.write_chrome_trace(timeline, out / "trace.json")
    if not _PROFILE.value:  # else it is printed with what was measured
        print(program_report.report_text(report), end="")
    print(f"wrote {out}/report.json, trace.json, schedule.hlo.gz")
    return report, module


if __name__ == "__main__":
    run_command(command)

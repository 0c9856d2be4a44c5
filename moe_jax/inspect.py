"""`python -m moe_jax.inspect`: what the GPU compiler schedules for a run, on a machine that has no GPU.

    python -m moe_jax.inspect --gin_file=configs/model/hecate_gpt_moe_s.gin --gin_bindings='train.batch_size = 256' \\
        --target=h200:4x8 --out=runs/inspect

prints, and writes to --out: report.json (memory, every collective, what computes beside it, modelled and exposed
time; the same with the expected rows of buckets alone, and with fewer cores beside transfers; what stands in command
buffers), timeline.png, trace.json (for ui.perfetto.dev) and schedule.hlo.gz (the program as the compiler scheduled it).
Without --target the devices of this machine are taken, and --profile puts measured times beside the modelled ones,
instruction by instruction, with the constants that would have fitted; --constants=FILE models with them.
Exit codes: 0, or 2 for a user's mistake.
"""

from __future__ import annotations

import dataclasses
import datetime
import gzip
import json
import lzma
import re
import zlib
from pathlib import Path

from absl import flags, logging

from moe_jax.config.command_line import parse_flags, run_command
from moe_jax.errors import UserError

PROFILED_STEPS = PLAIN_STEPS = 5

_GIN_FILES = flags.DEFINE_multi_string("gin_file", [], "Config file; may repeat, later ones win.")
_GIN_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "Binding such as 'train.steps = 40'; may repeat.")
_GIN_PATHS = flags.DEFINE_multi_string("gin_search_paths", [], "Folder in which config files are looked for.")
_TARGET = flags.DEFINE_string("target", "", "DEVICE:NODESxDEVICES, such as h200:4x8; '' takes this machine's GPUs.")
_OUT = flags.DEFINE_string("out", "", "Folder for report.json, timeline.png, trace.json and schedule.hlo.gz.")
_INSTALL = flags.DEFINE_bool("install", False, "Put the CUDA wheels into an environment of their own if missing.")
_HLO = flags.DEFINE_string(
    "hlo",
    "",
    "Read this schedule.hlo.gz (or .xz, or text) instead of compiling; needs no CUDA wheels. With the config of its "
    "run the rows of its buckets are counted too.",
)
_OPTIONS = flags.DEFINE_multi_string("compiler_option", [], "Option for the compiler, NAME=VALUE; may repeat.")
_BARE = flags.DEFINE_bool("bare", False, "Leave out what training tells the compiler: options, seconds.")
_PROFILE = flags.DEFINE_bool("profile", False, "On real devices: record some steps, and put measured times beside.")
_CONSTANTS = flags.DEFINE_string(
    "constants",
    "",
    "JSON with the cost model's constants: report.json of --profile, gpu_day.json, or your own; names: "
    "matmul_efficiency, memory_efficiency (shares), launch, conditional (seconds).",
)
_RATES = flags.DEFINE_string("rates", "", "Without --target: DEVICE whose rates the model takes, if it cannot tell.")
_HOST_DEVICES = flags.DEFINE_integer("host_devices", None, "Without --target: the CPU, split into so many devices.")
_PROGRAM = flags.DEFINE_enum(
    "program", "step", ["step", "complete"],
    "'step', what a step runs, or 'complete', which optimistic steps take after an overflow.",
)  # fmt: skip
_COMPLETE = flags.DEFINE_bool(
    "complete", False, "Of optimistic steps compile the complete program too, for what an overflow costs."
)
_SKEW = flags.DEFINE_float("skew", 1.0, "With a planner: it is shown loads that fall as rank to the power -skew.")


def compiler_options(given: list[str]) -> dict[str, str]:
    """Return NAME=VALUE flags as a dictionary."""
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"xla_\w+", name):
            raise UserError(f"--compiler_option ({text!r}) is not xla_NAME=VALUE")
        options[name] = value
    return options


def command(argv: list[str]) -> int:
    """Carry out the command line and return the exit code; errors are raised."""
    parse_flags(argv, "moe_jax.inspect", "gin_file")
    logging.set_verbosity(logging.WARNING)
    if not _OUT.value:
        raise UserError("--out is needed: the folder that the report is written to, such as --out=runs/inspect")
    options = compiler_options(_OPTIONS.value)
    if _TARGET.value:
        return inspect_target(argv, options)
    if _HLO.value:
        raise UserError("--hlo needs --target: DEVICE:NODESxDEVICES that the program was compiled for")
    return inspect_here(options)


def inspect_target(argv: list[str], options: dict[str, str]) -> int:
    """Inspect a program for a described topology."""
    from moe_jax.cluster.targets import parse_target

    if _PROFILE.value or _HOST_DEVICES.value:
        raise UserError(
            "--profile and --host_devices need real devices; leave --target out to take those of this machine"
        )
    target = parse_target(_TARGET.value)
    if _HLO.value:
        write_all(read_text(_HLO.value), target, model_of_flags(), {}, buckets_of_flags(target))
        return 0
    from moe_jax.analysis import compile_ahead, cuda_wheels

    model = model_of_flags()
    target.check_compilable(cuda_wheels.installed_cuda() or 13)
    config = compile_ahead.on_target(read_config(), target)
    code = cuda_wheels.run_with_wheels(argv[1:], _INSTALL.value)
    if code is not None:
        return code
    compile_ahead.prepare_process()
    devices = compile_ahead.described_devices(target)
    compiled, rest = compile_programs(config, devices, options, real=False)
    write_all(compiled.text, target, model, facts_of(compiled), compiled.buckets, compiled, rest)
    return 0


def compile_programs(config, devices, options: dict[str, str], *, real: bool):
    """Return the compiled step that the flags ask for, and with --complete the complete one beside a common one."""
    from moe_jax.analysis.compile_ahead import compile_step

    compiled = compile_step(
        config, devices, skew=_SKEW.value, options=options, real=real, bare=_BARE.value,
        complete=_PROGRAM.value == "complete", dump=True,
    )  # fmt: skip
    rest = None
    if _COMPLETE.value and compiled.common:
        rest = compile_step(
            config, devices, skew=_SKEW.value, options=options, real=real, bare=_BARE.value, complete=True
        )
    return compiled, rest


def inspect_here(options: dict[str, str]) -> int:
    """Inspect the program for the devices of this machine, and with --profile run it."""
    import jax

    from moe_jax.analysis import compile_ahead
    from moe_jax.analysis.instructions import compare_instructions, instructions_text, read_spans, record_steps
    from moe_jax.analysis.program_report import add_measured, measured_text, report_text
    from moe_jax.cluster.targets import device_named, parse_target, target_names

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
    model = model_of_flags()
    target = parse_target(f"{name}:{len(devices) // per_node}x{per_node}")
    config = compile_ahead.on_target(read_config(), target)
    compiled, rest = compile_programs(config, devices, options, real=True)
    report, module = write_all(compiled.text, target, model, facts_of(compiled), compiled.buckets, compiled, rest)
    if _PROFILE.value:
        folder = Path(_OUT.value) / "profile"
        seconds = record_steps(config, devices, compiled, folder, PROFILED_STEPS, PLAIN_STEPS)
        spans = read_spans(folder, module.name)
        measured = compare_instructions(module, target, model, spans, PROFILED_STEPS, seconds)
        report = add_measured(report, spans, PROFILED_STEPS)
        report = {**report, "instructions": measured, "constants": measured["constants"]}
        (Path(_OUT.value) / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(report_text(report) + measured_text(report), end="")
        print(instructions_text(measured), end="")
    return 0


def model_of_flags():
    """Return the cost model, with the constants of --constants."""
    from moe_jax.cluster.timeline import Model, read_constants

    return read_constants(_CONSTANTS.value) if _CONSTANTS.value else Model()


def read_config():
    """Return the run's config."""
    from moe_jax.config import parse_run_config

    return parse_run_config(_GIN_FILES.value, _GIN_BINDINGS.value, _GIN_PATHS.value)[0]


def facts_of(compiled) -> dict:
    """Return what the report says of the compilation."""
    from moe_jax.observe import environment_record

    return {
        "environment": environment_record(mesh=compiled.mesh),
        "bindings": [*_GIN_FILES.value, *_GIN_BINDINGS.value],
        "lower_seconds": compiled.lower_seconds,
        "compile_seconds": compiled.compile_seconds,
        "compiler_options": compiled.options,
        "guided_scheduler": compiled.guided,
        "plan_shape": compiled.plan_shape,
        "program": "common" if compiled.common else "complete",
        "resolved": compiled.resolved,
        "memory": compiled.memory,
        "model_flops": compiled.model_flops,
    }


def buckets_of_flags(target):
    """Return the buckets of the run that a saved schedule is of, if its config is given beside it; else ()."""
    if not (_GIN_FILES.value or _GIN_BINDINGS.value):
        return ()
    from moe_jax.analysis import compile_ahead

    return compile_ahead.buckets_on_target(compile_ahead.on_target(read_config(), target), target, _SKEW.value)


def assumed(module, target, model, buckets, compiled, complete) -> dict:
    """Return what the report says of rows, cores, overflows and thunks.

    Args:
      buckets: of the program, () where they are not known.
      compiled: what the text is of, None for a saved one, of which it is not known what overflows cost.
      complete: the complete program beside a common one, None where it was not compiled.
    """
    from moe_jax.analysis.program_report import cores_record, count_thunks, overflow_record, rows_record
    from moe_jax.cluster.hlo import parse_module
    from moe_jax.cluster.timeline import play

    found = {"cores": cores_record(module, target, model, buckets)}
    if buckets:
        found["rows"] = rows_record(module, target, model, buckets)
    if compiled and compiled.common:
        rest = play(parse_module(complete.text), target, model) if complete else None
        own = play(module, target, model)
        found["overflow"] = overflow_record(own, buckets, rest)
        if complete:
            found["overflow"]["complete_compile_seconds"] = complete.compile_seconds
    if compiled and compiled.thunks:
        found["thunks"] = dataclasses.asdict(count_thunks(*compiled.thunks, module))
    return found


def read_text(path: str) -> str:
    """Return a saved schedule."""
    try:
        data = Path(path).read_bytes()
        packed = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(Path(path).suffix, bytes)
        return packed(data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"--hlo ({path!r}) cannot be read: {error}") from error


def without_places(text: str) -> str:
    """Return a schedule without the tables of source files and lines, which name this machine's folders."""
    text = re.sub(r"\n(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*", "\n", text)
    return re.sub(r" (?:stack_frame_id|source_line|source_end_line|source_column|source_end_column)=\d+"
                  r"| source_file=\"[^\"]*\"", "", text)  # fmt: skip


def write_all(text: str, target, model, facts: dict, buckets=(), compiled=None, complete=None):
    """Model a schedule, print the report and fill the folder; return the report and the program (`Module`).

    Args:
      buckets, compiled, complete: see `assumed`.
    """
    from moe_jax.analysis.draw import draw_timeline, write_chrome_trace
    from moe_jax.analysis.program_report import build_report, report_text
    from moe_jax.cluster.hlo import parse_module
    from moe_jax.cluster.timeline import play

    module = parse_module(text)
    timeline = play(module, target, model)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    facts = {**facts, **assumed(module, target, model, buckets, compiled, complete)}
    report = build_report(timeline, target, model, date=today, **facts)
    out = Path(_OUT.value)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (out / "schedule.hlo.gz").write_bytes(gzip.compress(without_places(text).encode(), mtime=0))
        write_chrome_trace(timeline, out / "trace.json")
    except OSError as error:
        raise UserError(f"--out ({_OUT.value!r}) cannot be written: {error}") from error
    if not _PROFILE.value:  # else it is printed with what was measured
        print(report_text(report), end="")
    try:
        draw_timeline(timeline, out / "timeline.png", f"{target.nodes} x {target.per_node} {target.device}")
    except ModuleNotFoundError:
        print("timeline.png needs matplotlib, which is not installed; pip install matplotlib")
    print(f"wrote {out}/report.json, timeline.png, trace.json, schedule.hlo.gz")
    return report, module


if __name__ == "__main__":
    run_command(command)

"""Time the collectives and matmuls of the devices at hand, and write a cluster file.

    python -m moe_jax.calibrate --out=cluster.json --host_devices=8
    python -m moe_jax.calibrate --out=cluster.json --gin_bindings='MeshConfig.expert_shard = 4' ...

Without gin the file serves every mesh whose N_MP and N_ESP are 1, 2 or 4; with it, the mesh that it describes. The file
is for `MoEConfig.cluster` (schedule 'parm'), `PlannerConfig.cluster` and `moe_jax.replay --cluster`; what was measured
lies next to it (.csv). On several hosts start it on each, as `train`. A user's mistake is one line, exit code 2.
"""

from __future__ import annotations

import csv
import pathlib

from absl import flags

from moe_jax.config.command_line import define_config_flags, define_job_flags, parse_flags, run_command
from moe_jax.errors import UserError

_OUT = flags.DEFINE_string("out", None, "File to write, such as cluster.json.")
_GIN_FILES, _GIN_BINDINGS, _GIN_PATHS, _HOST_DEVICES = define_config_flags()
flags.DEFINE_integer("largest", 2**22, "Bytes of the largest message.")
flags.DEFINE_integer("points", 6, "Sizes from 16 KiB to that.")
flags.DEFINE_integer("rounds", 9, "Interleaved calls of each size.")
flags.DEFINE_integer("devices_per_node", 0, "Devices of a node; 0 takes those of a host.")
flags.DEFINE_bool("compute", True, "Time matmuls, gating and moving rows too.")
flags.DEFINE_integer("layers", 14, "Whole layers to time under each schedule; 0 for none.")
_PLACE = define_job_flags()


def command(argv: list[str]) -> None:
    """Carry out the command line."""
    parse_flags(argv, "moe_jax.calibrate", "out")
    if not _OUT.value:
        raise UserError("--out is missing; name the file to write, such as --out=cluster.json")
    mesh = None
    if _GIN_FILES.value or _GIN_BINDINGS.value:
        from moe_jax.config.gin_files import parse_run_config

        mesh = parse_run_config(_GIN_FILES.value, _GIN_BINDINGS.value, _GIN_PATHS.value)[0].mesh
    from moe_jax.parallel.mesh import set_up_devices

    set_up_devices(_HOST_DEVICES.value)
    import jax

    from moe_jax.analysis.calibrate import CalibrationOptions, calibrate
    from moe_jax.cluster import write_cluster
    from moe_jax.jobs.start import start_hosts

    names = ("largest", "points", "rounds", "devices_per_node", "compute", "layers")
    options = CalibrationOptions(**{name: flags.FLAGS[name].value for name in names})
    with start_hosts(**{flag.name: flag.value for flag in _PLACE}) as hosts:
        say = (lambda line: print(line, flush=True)) if hosts.is_main else (lambda line: None)
        cluster, points = calibrate(jax.devices(), options, hosts, mesh, say)
        if hosts.is_main:
            out = pathlib.Path(_OUT.value)
            write_cluster(cluster, out)
            with open(out.with_suffix(".csv"), "w", encoding="utf-8", newline="") as file:  # sizes as each fit has them
                writer = csv.writer(file)
                writer.writerow(["name", "x", "y", "seconds"])
                for name, found in points.items():
                    writer.writerows([name, *point] for point in found)
            r2 = {name: fit.r2 for name, fit in cluster.fits if fit.r2 is not None}
            least = min(r2, key=lambda name: r2[name])
            print(
                f"{out}: {len(r2)} fits of seconds over bytes or FLOPs; the least R^2 is {r2[least]:.4f}, of {least}; "
                f"below 0.98: {', '.join(name for name, value in r2.items() if value < 0.98) or 'none'}"
            )


if __name__ == "__main__":
    run_command(command)

"""`python -m moe_jax.supervise --hosts=a:8475,b:8475 -- python -m moe_jax.train ...`: a job that comes back by itself.

Start it once on every host, spares too. It starts the command behind `--`, once or --workers_per_host times, and tells
each process its place; when a process or host is lost, all start again on those that are left. Nothing of jax is here.

Exit codes: 0 finished, 2 a user's mistake or starts that fail again and again, 3 a loss that is not finite, 4 this host
or the job was lost (start it again), 75 told to end, and saved (start it again).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from absl import flags

from moe_jax.config.command_line import parse_flags, run_command
from moe_jax.errors import UserError
from moe_jax.recovery.job_secret import read_secret
from moe_jax.recovery.links import parse_hosts
from moe_jax.recovery.supervisor import Supervisor, SupervisorConfig

_HOSTS = flags.DEFINE_string(
    "hosts", "", "host:port of every host's supervisor, with commas; process 0 listens one port higher."
)
_HOST_INDEX = flags.DEFINE_integer(
    "host_index", None, "Place of this host in --hosts, from 0; default: as Slurm or Kubernetes say, or by its address."
)
_SPARES = flags.DEFINE_integer("spares", 0, "So many of the hosts stand by, each for one that is lost.")
_MIN_HOSTS = flags.DEFINE_integer("min_hosts", 1, "Train on no fewer hosts than these.")
_WORKERS_PER_HOST = flags.DEFINE_integer("workers_per_host", 1, "Processes a host; with several, one for each GPU.")
_LOST_AFTER_SECONDS = flags.DEFINE_float("lost_after_seconds", 10.0, "Silence after which a host counts as lost.")
_START_TIMEOUT_SECONDS = flags.DEFINE_float("start_timeout_seconds", 300.0, "Wait so long for hosts that are missing.")
_INDEX_VARIABLES = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")


def command(argv: list[str]) -> int:
    """Carry out the command line and return the job's exit code; errors are raised."""
    end = argv.index("--") if "--" in argv else len(argv)
    own, supervised = argv[:end], argv[end + 1 :]
    parse_flags(own, "moe_jax.supervise", "hosts")
    if not supervised:
        raise UserError("the command that trains is missing; give it behind --, as in -- python -m moe_jax.train ...")
    if not _HOSTS.value:
        raise UserError("--hosts is needed: host:port of every host, as in --hosts=node0:8475,node1:8475")
    hosts = parse_hosts(_HOSTS.value)
    config = SupervisorConfig(
        hosts=hosts,
        index=find_index(hosts, os.environ) if _HOST_INDEX.value is None else _HOST_INDEX.value,
        command=supervised,
        workdir=find_workdir(supervised),
        spares=_SPARES.value,
        min_hosts=_MIN_HOSTS.value,
        workers_per_host=_WORKERS_PER_HOST.value,
        lost_after_seconds=_LOST_AFTER_SECONDS.value,
        start_timeout_seconds=_START_TIMEOUT_SECONDS.value,
    )
    return Supervisor(config, read_secret()).run()


def find_workdir(supervised: Sequence[str]) -> str:
    """Return the run folder that a command names; a UserError where it names none."""
    for word, following in zip(supervised, [*supervised[1:], ""], strict=True):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name == "workdir" and (value or following):
            return value if equals else following
    raise UserError("the command behind -- needs --workdir, the run folder, whose lease tells which hosts go on")


def find_index(hosts: Sequence[tuple[str, int]], environment: Mapping[str, str]) -> int:
    """Return this host's place among the hosts: from the launcher, else the only one whose address is this machine's.

    UserError: neither tells.
    """
    for name in _INDEX_VARIABLES:
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    own = []
    for index, (host, _) in enumerate(hosts):
        try:
            address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(address[0], socket.SOCK_STREAM) as probe:
                probe.bind(address[4])  # only an address of this machine can be bound
            own.append(index)
        except OSError:
            continue
    if len(own) == 1:
        return own[0]
    found = f"{len(own)} of them are addresses of this machine" if own else "none is an address of this machine"
    raise UserError(f"--hosts names {len(hosts)} hosts, and {found}; give --host_index")


if __name__ == "__main__":
    run_command(command)

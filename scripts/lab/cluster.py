"""A cluster on one machine: runs a command on several hosts that are network namespaces joined by slow links.

    sudo python scripts/lab/cluster.py --hosts=4 --rate=200mbit --devices_per_host=2 -- \\
        python -m moe_jax.train --gin_file=configs/run/demo.gin --workdir=runs/lab

Each host is one process with its own address, host name and CPU devices, joined to the others by jax.distributed over
links of the given rate: here bytes take time, and hosts can die. A program of moe_jax gets --coordinator,
--num_processes, --process_id and --host_devices appended; any other command finds JAX_COORDINATOR_ADDRESS,
JAX_NUM_PROCESSES, JAX_PROCESS_ID and JAX_NUM_CPU_DEVICES in its environment.

The hosts' output appears with the host's name before each line. Ctrl-C, SIGTERM and SIGHUP are passed on; a second one
kills. When a host fails, the others have --grace seconds to notice. Exit code: 0, or that of the first host that failed
(128 + n if signal n killed it); 2 for a mistake or if the machine lacks something, 124 after --timeout. What a killed
lab leaves behind is removed at the next start, or by --clean. Linux only; needs root and iproute2.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from network import LabError, build_network, check_shape, find_missing, remove_leftovers, remove_network
from processes import LabRun


def parse_flags(arguments: list[str]) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="lab_cluster.py", description=summary, epilog=details, formatter_class=raw)
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (2)")
    parser.add_argument("--devices_per_host", type=int, default=1, help="CPU devices of each host (1)")
    parser.add_argument("--rate", help="rate between hosts, each way, as in 200mbit (default: as fast as it goes)")
    parser.add_argument("--logs", type=Path, help="folder for a copy of each host's output")
    parser.add_argument("--grace", type=float, default=60.0, help="seconds for the others after a failure (60)")
    parser.add_argument("--timeout", type=float, help="seconds after which everything is killed")
    parser.add_argument("--clean", action="store_true", help="remove what killed labs left behind, and stop")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    flags = parser.parse_args(arguments)
    flags.command = flags.command[1:] if flags.command[:1] == ["--"] else flags.command
    return flags


def run_lab(flags: argparse.Namespace) -> int:
    """Build the lab, run the command, remove the lab; return the exit code.

    Raises:
      LabError: a mistake in the flags, or something that the machine lacks.
    """
    check_shape(flags.hosts, flags.devices_per_host, flags.rate)
    if not flags.command and not flags.clean:
        raise LabError("no command: give it after --, as in cluster.py --hosts=2 -- python -m moe_jax.train ...")
    if missing := find_missing(shaped=bool(flags.rate)):
        raise LabError(missing)
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: received.append(number))
    for name in remove_leftovers():
        print(f"lab_cluster: removed {name}, left by a lab that was killed", file=sys.stderr)
    if flags.clean:
        return 0
    if flags.logs:
        flags.logs.mkdir(parents=True, exist_ok=True)
    run = None
    try:
        hosts = build_network(flags.hosts, flags.rate)
        if received:
            return 128 + received[0]
        run = LabRun(hosts, flags.command, devices=flags.devices_per_host, logs=flags.logs, grace_seconds=flags.grace)
        return watch_run(run, flags.timeout, received)
    finally:
        if run:
            run.kill()
        remove_network()


def watch_run(run: LabRun, timeout: float | None, received: list[int]) -> int:
    """Wait for the run to end, passing signals on; return the exit code."""
    deadline = time.monotonic() + timeout if timeout else None
    passed_on, timed_out = 0, False
    while not run.is_done:
        if run.is_output_closed and not received:
            received.append(signal.SIGTERM)
        if len(received) > passed_on:
            run.pass_on(received[0]) if passed_on == 0 and len(received) == 1 else run.kill()
            passed_on = len(received)
        if deadline and time.monotonic() > deadline and not timed_out:
            timed_out = True
            run.say(f"killing all hosts: still running after --timeout={timeout:g} s")
            run.kill()
        run.poll()
        time.sleep(0.05)
    run.finish()
    if run.exit_code:
        for ended in run.exits:
            run.say(ended)
    return 124 if timed_out else run.exit_code


def main() -> None:
    flags = parse_flags(sys.argv[1:])
    try:
        code = run_lab(flags)
    except LabError as error:
        print(f"lab_cluster: {error}", file=sys.stderr)
        code = 2
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python prints an error at exit
    sys.exit(code)


if __name__ == "__main__":
    main()

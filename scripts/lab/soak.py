"""Runs the lab many times, interrupts or kills half of the runs at random moments, and checks that nothing is left.

    sudo python scripts/lab/soak.py --times=20 [--seed=0]

Every other run is disturbed in one of five ways: SIGINT or SIGTERM to the lab, SIGKILL to the lab, SIGKILL to one
host's process, or one host's link taken down for good. Each run's exit code must be the one for that. After the next
start (`cluster.py --clean`) there must be no namespace, no bridge, no folder under /etc/netns and no process left.
Prints a table, then one JSON line; exit code 1 if anything was wrong. Twenty runs take about three minutes.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from network import LabError, find_missing, lab_names, processes_in

_LAB = Path(__file__).parent
_MARK = "MOE_JAX_LAB_SOAK"
_WAYS = ("SIGINT", "SIGTERM", "SIGKILL of the lab", "SIGKILL of a host", "link down")
_LINK_DOWN_SECONDS = 60  # the watchdog names a silent host after 30 s


def run_once(hosts: int, way: str | None, moment: float, mark: str) -> dict:
    """Run the lab once; disturb it after `moment` seconds."""
    ring = [sys.executable, str(_LAB / "ring.py"), "--seconds=4"]
    command = [sys.executable, str(_LAB / "cluster.py"), f"--hosts={hosts}", "--rate=200mbit", "--", *ring]
    start = time.monotonic()
    environment = os.environ | {_MARK: mark}
    lab = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    before = set(lab_names())
    disturbed = None
    if way:
        try:
            lab.wait(moment)
        except subprocess.TimeoutExpired:
            own = [name for name in set(lab_names()) | before if name.startswith(f"moelab-{lab.pid}-")]
            disturbed = _disturb(lab, way, own)
    _, said = lab.communicate(timeout=300)
    return {
        "way": disturbed or "none",
        "moment": round(moment, 1) if disturbed else None,
        "exit_code": lab.returncode,
        "seconds": round(time.monotonic() - start, 1),
        "last_line": said.strip().splitlines()[-1] if said.strip() else "",
    }


def _disturb(lab: subprocess.Popen, way: str, namespaces: list[str]) -> str | None:
    """Disturb the lab; return what was done, or None if the lab was not ready for it."""
    if way in ("SIGINT", "SIGTERM"):
        lab.send_signal(getattr(signal, way))
        return way
    if way == "SIGKILL of the lab":
        lab.kill()
        return way
    victims = [(name, pid) for name in sorted(namespaces) if not name.endswith("switch") for pid in processes_in(name)]
    if not victims:
        return None
    name, pid = random.choice(victims)
    if way == "SIGKILL of a host":
        os.kill(pid, signal.SIGKILL)
    else:
        subprocess.run(["ip", "-n", name, "link", "set", "eth0", "down"], check=False, capture_output=True)
    return way


def is_expected(outcome: dict) -> bool:
    """Say whether an exit code is what the disturbance calls for."""
    code, way = outcome["exit_code"], outcome["way"]
    if way == "none":
        return code == 0
    if way == "SIGKILL of the lab":
        return code == -signal.SIGKILL
    if way == "SIGKILL of a host":
        return code == 128 + signal.SIGKILL
    if way == "link down":
        return code == 4 and outcome["seconds"] < _LINK_DOWN_SECONDS
    return code != 0  # a signal ends the ring wherever it is


def find_remains(mark: str, bridges_before: set[str]) -> list[str]:
    """Return what is left of all labs: namespaces, folders, bridges, processes."""
    remains = [f"namespace or folder {name}" for name in lab_names()]
    remains += [f"bridge {name}" for name in list_bridges() - bridges_before]
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                remains.append(f"process {folder.name}")
        except OSError:
            pass  # it has ended, or a kernel thread
    return remains


def list_bridges() -> set[str]:
    """Return the bridges of the machine's own network."""
    return {path.parent.name for path in Path("/sys/class/net").glob("*/bridge")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    if missing := find_missing(shaped=True):
        raise LabError(missing)
    random.seed(flags.seed)
    mark, bridges = f"{os.getpid()}-{flags.seed}", list_bridges()
    outcomes = []
    print(f"{'run':>3}  {'disturbed by':20} {'at s':>5} {'code':>5} {'s':>6}  last line of the lab")
    for run in range(flags.times):
        way = _WAYS[run // 2 % len(_WAYS)] if run % 2 else None
        outcome = run_once(flags.hosts, way, random.uniform(0.05, 6.0), mark)
        outcome["expected"] = is_expected(outcome)
        outcomes.append(outcome)
        shown = (
            f"{run:3}  {outcome['way']:20} {outcome['moment'] or '':>5} {outcome['exit_code']:5} {outcome['seconds']:6}"
        )
        print(f"{shown}  {'' if outcome['expected'] else 'UNEXPECTED: '}{outcome['last_line']}", flush=True)
    subprocess.run([sys.executable, str(_LAB / "cluster.py"), "--clean"], check=True, capture_output=True)
    remains = find_remains(mark, bridges)
    for line in remains:
        print(f"left behind: {line}")
    unexpected = sum(not outcome["expected"] for outcome in outcomes)
    disturbed = sum(outcome["way"] != "none" for outcome in outcomes)
    print(json.dumps({"runs": len(outcomes), "disturbed": disturbed, "unexpected": unexpected, "left_behind": remains}))
    sys.exit(int(bool(remains or unexpected)))


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        print(f"lab_soak: {error}", file=sys.stderr)
        sys.exit(2)

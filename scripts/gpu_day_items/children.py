"""Run parts in child processes, one at a time, each with a limit. Standard library alone.

Inputs: parts, and a deadline. Outputs: one record per part: status, seconds, what the part recorded, and, where it
failed, the reason with the last lines of stderr. A child reports in JSON lines on a pipe, so what it recorded before it
died is kept.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from gpu_day_items.plan import Part

FOLDER = pathlib.Path(__file__).resolve().parent
LAST_LINES = 12
OK, SKIPPED, FAILED, CRASHED, TIMED_OUT = "ok", "skipped", "failed", "crashed", "timed out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workspace:
    """Where children work.

    Attributes:
      out: the day's folder, which holds the link to the compilation cache.
      scratch: folder for temporary files.
      tiny: sizes and devices of a CPU.
      patience: factor on every limit, above 1 for a busy CPU.
    """

    out: pathlib.Path
    scratch: pathlib.Path
    tiny: bool
    patience: float = 1.0


def environment(workspace: Workspace, flags: str) -> dict[str, str]:
    """Return a child's environment: one GPU, no preallocation, one compilation cache."""
    paths = [str(FOLDER.parents[1]), str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_COMPILATION_CACHE_DIR": str(workspace.out / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XDG_CACHE_HOME": str(workspace.scratch / "cache_home"),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
    }
    found.setdefault("CUDA_VISIBLE_DEVICES", "0")
    found.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if found.get("JAX_PLATFORMS") and "cpu" not in found["JAX_PLATFORMS"]:
        found["JAX_PLATFORMS"] += ",cpu"  # some items compare with it
    if workspace.tiny:
        found["JAX_PLATFORMS"] = "cpu"
        found["XLA_FLAGS"] = f"{found['XLA_FLAGS']} --xla_force_host_platform_device_count=1".strip()
    return found


def run_parts(parts: Sequence[Part], workspace: Workspace, deadline: float, tell: Callable[[list], None]) -> list[dict]:
    """Run parts in their order; return a record of each.

    Args:
      deadline: of `time.monotonic`, for all of them.
      tell: called with the records so far after each child.
    """
    records: list[dict] = []
    left = list(parts)
    while left:
        part, status = left[0], {record["name"]: record["status"] for record in records}
        unneeded, reason = part.unless and status.get(part.unless) == OK, ""
        if part.after and status.get(part.after) != OK:
            reason = f"{part.after!r}: {status.get(part.after, 'not run')}"
        elif deadline - time.monotonic() < 1:
            reason = "the time of its item was spent"
        if unneeded or reason:
            left.pop(0)
            if not unneeded:
                records.append({"name": part.name, "status": SKIPPED, "seconds": 0.0, "reason": reason})
            continue
        together = [part]
        for other in left[1:]:
            if other.flags != part.flags or other.unless or other.after:
                break
            together.append(other)
        found = _run_child(together, workspace, deadline)
        records += found
        del left[: len(found)]
        tell(records)
    return records


def _run_child(parts: list[Part], workspace: Workspace, deadline: float) -> list[dict]:
    """Run parts in one process until one goes wrong; return records of those that were begun, at least one."""
    reader, writer = os.pipe()
    sizes, calls = "tiny" if workspace.tiny else "full", [[part.name, part.call, part.arguments] for part in parts]
    words = [sys.executable, "-m", "gpu_day_items.child", str(writer), str(workspace.scratch), sizes, json.dumps(calls)]
    log = workspace.scratch / "child.log"
    with open(log, "wb") as output, os.fdopen(reader, "rb", buffering=0) as pipe:
        process = subprocess.Popen(
            words,
            env=environment(workspace, parts[0].flags),
            cwd=FOLDER.parents[1],
            stdin=subprocess.PIPE,  # a child whose parent is gone reads its end there
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(writer,),
            start_new_session=True,
        )
        os.close(writer)
        try:
            return _listen(parts, process, pipe, log, deadline, workspace.patience)
        finally:
            _kill(process)


def _listen(parts: list[Part], process, pipe, log: pathlib.Path, deadline: float, patience: float) -> list[dict]:
    records: list[dict] = []
    waiting = b""
    for part in parts:
        if records and deadline - time.monotonic() < 1:
            break
        record: dict = {"name": part.name, "status": "", "seconds": 0.0}
        records.append(record)
        began = time.monotonic()
        until, wants_death = min(began + part.limit * patience, deadline), False
        while not record["status"]:
            line, newline, rest = waiting.partition(b"\n")
            if newline:  # values to keep, a row for the page, or how the part ended
                waiting, message = rest, json.loads(line)
                record.update(message.get("values", {}))
                if "row" in message:
                    record.setdefault("rows", []).append(message["row"])
                if "end" in message:  # one that asks to be killed does so as a part of what it tests
                    wants_death = message["end"] == "kill"
                    record["status"] = OK if wants_death else message["end"]
                if "reason" in message:
                    record["reason"] = message["reason"]
                continue
            ready, _, _ = select.select([pipe], [], [], max(until - time.monotonic(), 0))
            data = os.read(pipe.fileno(), 1 << 16) if ready else b""
            waiting += data
            if not ready:
                record["status"], record["reason"] = TIMED_OUT, f"not done after {until - began:.0f} s; killed"
            elif not data:
                record["status"] = CRASHED
                try:
                    code = process.wait(timeout=10)
                    record["reason"] = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                except subprocess.TimeoutExpired:
                    record["reason"] = "its process closed the pipe and went on"
        record["seconds"] = round(time.monotonic() - began, 2)
        if record["status"] not in (OK, SKIPPED):
            _kill(process)
            with open(log, "rb") as file:
                file.seek(max(0, log.stat().st_size - 16384))
                lines = file.read().decode(errors="replace").splitlines()
            record["stderr"] = [line[:400] for line in lines if line.strip()][-LAST_LINES:]
            break
        if wants_death:
            break
    return records


def _kill(process) -> None:
    """End a child and everything that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    try:
        process.wait(timeout=10)  # it is gone at once, or not at all
    except subprocess.TimeoutExpired:  # it hangs inside the driver, which no signal reaches; the day goes on
        pass
    if process.stdin and not process.stdin.closed:
        process.stdin.close()

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
KILLED_SECONDS = 10  # a killed process is gone at once, or not at all
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
        reason = _reason_to_skip(left[0], records, deadline)
        if reason is not None:
            part = left.pop(0)
            if reason:
                records.append({"name": part.name, "status": SKIPPED, "seconds": 0.0, "reason": reason})
            continue
        together = [left[0]]
        for part in left[1:]:
            if part.flags != together[0].flags or part.unless or part.after:
                break
            together.append(part)
        found = _run_child(together, workspace, deadline)
        records += found
        del left[: len(found)]
        tell(records)
    return records


def _reason_to_skip(part: Part, records: list[dict], deadline: float) -> str | None:
    """Return why a part does not run: '' where nothing need be said, None where it runs."""
    status = {record["name"]: record["status"] for record in records}
    if part.unless and status.get(part.unless) == OK:
        return ""
    if part.after and status.get(part.after) != OK:
        return f"{part.after!r}: {status.get(part.after, 'not run')}"
    if deadline - time.monotonic() < 1:
        return "the time of its item was spent"
    return None


def _run_child(parts: list[Part], workspace: Workspace, deadline: float) -> list[dict]:
    """Run parts in one process until one goes wrong; return records of those that were begun, at least one."""
    reader, writer = os.pipe()
    words = [
        sys.executable,
        "-m",
        "gpu_day_items.child",
        str(writer),
        str(workspace.scratch),
        "tiny" if workspace.tiny else "full",
    ]
    words.append(json.dumps([[part.name, part.call, part.arguments] for part in parts]))
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
        record: dict = {"name": part.name, "status": "", "seconds": 0.0}
        if records and deadline - time.monotonic() < 1:
            break
        records.append(record)
        began = time.monotonic()
        until = min(began + part.limit * patience, deadline)
        while not record["status"]:
            line, newline, rest = waiting.partition(b"\n")
            if newline:
                waiting = rest
                _take_in(record, json.loads(line))
                continue
            ready, _, _ = select.select([pipe], [], [], max(until - time.monotonic(), 0))
            data = os.read(pipe.fileno(), 1 << 16) if ready else b""
            if data:
                waiting += data
            elif ready:
                record["status"], record["reason"] = CRASHED, _death(process)
            else:
                record["status"] = TIMED_OUT
                record["reason"] = f"not done after {until - began:.0f} s; killed"
        record["seconds"] = round(time.monotonic() - began, 2)
        if record["status"] not in (OK, SKIPPED):
            _kill(process)
            record["stderr"] = last_lines(log)
            break
        if record.pop("killed", False):
            break
    return records


def _take_in(record: dict, message: dict) -> None:
    """Take in what a child said: 'values' to keep, 'rows' for the page, or how its part ended."""
    record.update(message.get("values", {}))
    if "row" in message:
        record.setdefault("rows", []).append(message["row"])
    if message.get("end") == "kill":  # it asks to be killed, as a part of what it tests
        record["killed"] = True
    if "end" in message:
        record["status"] = OK if message["end"] == "kill" else message["end"]
    if "reason" in message:
        record["reason"] = message["reason"]


def _death(process) -> str:
    try:
        code = process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        return "its process closed the pipe and went on"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _kill(process) -> None:
    """End a child and everything that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    try:
        process.wait(timeout=KILLED_SECONDS)
    except subprocess.TimeoutExpired:  # it hangs inside the driver, which no signal reaches; the day goes on
        pass
    if process.stdin and not process.stdin.closed:
        process.stdin.close()


def last_lines(log: pathlib.Path) -> list[str]:
    """Return the last lines that a child wrote."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 16384))
        lines = file.read().decode(errors="replace").splitlines()
    return [line[:400] for line in lines if line.strip()][-LAST_LINES:]

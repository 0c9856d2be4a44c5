"""Run the items of a day and write what is known after each. Standard library alone.

Inputs: items, a folder, a limit in seconds. Outputs: gpu_day.json and gpu_day.md in the folder, complete at any moment.
Children share one compilation cache, `cache` in the folder; it is a link to a temporary folder, so the folder itself
stays small however the run ends.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence

from gpu_day_items import children, page
from gpu_day_items.plan import PROBE, Item

PATIENCE = 8  # of a day at tiny sizes
ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(items: Sequence[Item], out: pathlib.Path, *, limit: float, tiny: bool, command: str) -> int:
    """Run the items; return 0 if every part of each is well or does not apply here, else 1."""
    began = time.monotonic()
    deadline = began + limit
    day = {
        "schema": 1,
        "command": f"python {command}",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **commit(),
        "machine": {},
        "sizes": "tiny" if tiny else "full",
        "limit_seconds": limit,
        "seconds": 0.0,
        "finished": False,
        "constants": {},
        "items": [],
        "unfinished": None,
    }
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="gpu_day_"))
    link_cache(out, scratch)
    workspace = children.Workspace(out=out, scratch=scratch, tiny=tiny, patience=PATIENCE if tiny else 1)

    def tell(unfinished: dict | None = None):
        day["seconds"], day["unfinished"] = round(time.monotonic() - began, 1), unfinished
        write(out, day)

    tell()
    try:
        workspace = probe(day, workspace, deadline)
        tell()
        for item in items:
            day["items"].append(run_item(item, workspace, deadline, tell))
            day["constants"] = constants_of(day["items"])
            tell()
            keep_files(scratch, out)
            print(page.summary_line(day["items"][-1]), flush=True)
        day["finished"] = True
        tell()
    finally:
        if (out / "cache").is_symlink():
            (out / "cache").unlink()
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"wrote {out}/gpu_day.json, gpu_day.md in {day['seconds']:.0f} s")
    return 0 if all(item["status"] == children.OK for item in day["items"]) else 1


def probe(day: dict, workspace: children.Workspace, deadline: float) -> children.Workspace:
    """Fill in the machine; return the workspace with tiny sizes where jax finds no GPU."""
    (record,) = children.run_parts([PROBE], workspace, deadline, lambda _: None)
    day["machine"] = {**host(), **{name: value for name, value in record.items() if name != "name"}}
    if record.get("platform") == "gpu" or workspace.tiny:
        return workspace
    reason = record.get("reason", f"jax finds {record.get('device_kind', 'nothing')}")
    print(f"no GPU here ({reason}): tiny sizes on the CPU instead", flush=True)
    day["sizes"] = "tiny"
    return children.Workspace(out=workspace.out, scratch=workspace.scratch, tiny=True, patience=PATIENCE)


def run_item(item: Item, workspace: children.Workspace, deadline: float, tell) -> dict:
    """Run one item and return its record."""
    record: dict = {"number": item.number, "name": item.name, "title": item.title}
    began = time.monotonic()
    left = deadline - began
    if left < item.least and not workspace.tiny:
        reason = f"{left:.0f} s of the limit were left, and it needs at least {item.least:.0f} s"
        return {**record, "status": children.SKIPPED, "seconds": 0.0, "reason": reason, "parts": []}
    until = min(began + item.budget * workspace.patience, deadline)
    parts = children.run_parts(item.parts, workspace, until, lambda parts: tell({**record, "parts": parts}))
    names = {part["name"]: part for part in parts}
    for part in item.parts:  # a part whose substitute went well is recorded, and the item is well
        if part.unless and names.get(part.name, {}).get("status") == children.OK:
            names.pop(part.unless, None)
    bad = [part["name"] for part in names.values() if _went_wrong(part)]
    return {
        **record,
        "status": children.OK if not bad else "incomplete",
        "seconds": round(time.monotonic() - began, 1),
        **({"reason": f"went wrong: {', '.join(bad)}"} if bad else {}),
        "parts": parts,
    }


def _went_wrong(part: dict) -> bool:
    spent = part["status"] == children.SKIPPED and "the time of its item" in part.get("reason", "")
    return spent or part["status"] not in (children.OK, children.SKIPPED)


def constants_of(items: list[dict]) -> dict[str, float]:
    """Return the constants of inspect's model that were measured; a conditional's by its own item if that ran."""
    found: dict[str, float] = {}
    for item in items:
        for part in item["parts"]:
            found.update(part.get("constants", {}))
    return found


def host() -> dict:
    """Return what is known of the machine without jax."""
    found = {"system": platform.system(), "architecture": platform.machine(), "cpu_count": os.cpu_count()}
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return found
    if done.returncode == 0 and done.stdout.strip():
        name, driver, memory = (word.strip() for word in done.stdout.splitlines()[0].split(","))
        found.update(gpu=name, driver=driver, gpu_memory=memory, gpus=len(done.stdout.splitlines()))
    return found


def commit() -> dict:
    """Return the commit of this checkout, or where git is not there the version of the package."""
    from moe_jax.observe.run_folder import git_state

    state = git_state()
    if state["commit"] is not None:
        return state
    from importlib import metadata

    try:
        version = metadata.version("moe_jax")
    except metadata.PackageNotFoundError:
        import re

        found = re.search(r'version="([^"]+)"', (ROOT / "setup.py").read_text(encoding="utf-8"))
        version = found.group(1) if found else "unknown"
    return {**state, "package_version": version}


def link_cache(out: pathlib.Path, scratch: pathlib.Path) -> None:
    """Make `out/cache` a link to the compilation cache of this day."""
    (scratch / "compiled").mkdir()
    link = out / "cache"
    if link.is_symlink():
        link.unlink()
    if not link.exists():
        link.symlink_to(scratch / "compiled", target_is_directory=True)


def write(out: pathlib.Path, day: dict) -> None:
    """Write both files, each whole or not at all."""
    record = json.dumps(strict(day), indent=1, allow_nan=False) + "\n"
    for name, text in (("gpu_day.json", record), ("gpu_day.md", page.page(day))):
        whole = out / f".{name}.new"
        whole.write_text(text, encoding="utf-8")
        os.replace(whole, out / name)


def strict(value):
    """Return plain data with the strings "nan", "inf" and "-inf" for floats that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: strict(item) for name, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, list | tuple) else value


def keep_files(scratch: pathlib.Path, out: pathlib.Path) -> None:
    """Move the files that children left for the day's folder; none is larger than what a reader would take."""
    for path in sorted((scratch / "keep").glob("*")):
        if path.stat().st_size < 15_000_000:
            shutil.move(path, out / path.name)
        else:
            path.unlink()

"""Run the items of a day and write what is known after each. Standard library and the tables of prices alone.

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

from gpu_day_items import children
from gpu_day_items.plan import PROBE, Item
from moe_jax.cluster.fits import rows_of

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
        "assumed": [dict(row) for row in rows_of("assumed")],  # what no public table has, and what would measure it
        "items": [],
        "unfinished": None,
    }
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="gpu_day_"))
    (scratch / "compiled").mkdir()
    link = out / "cache"
    if link.is_symlink():
        link.unlink()
    if not link.exists():
        link.symlink_to(scratch / "compiled", target_is_directory=True)
    workspace = children.Workspace(out=out, scratch=scratch, tiny=tiny, patience=PATIENCE if tiny else 1)

    def tell(unfinished: dict | None = None):
        day["seconds"], day["unfinished"] = round(time.monotonic() - began, 1), unfinished
        write(out, day)

    tell()
    try:
        (record,) = children.run_parts([PROBE], workspace, deadline, lambda _: None)
        day["machine"] = {**host(), **{name: value for name, value in record.items() if name != "name"}}
        if record.get("platform") != "gpu" and not tiny:
            reason = record.get("reason", f"jax finds {record.get('device_kind', 'nothing')}")
            print(f"no GPU here ({reason}): tiny sizes on the CPU instead", flush=True)
            day["sizes"] = "tiny"
            workspace = children.Workspace(out=out, scratch=scratch, tiny=True, patience=PATIENCE)
        tell()
        for item in items:
            record = run_item(item, workspace, deadline, tell)
            day["items"].append(record)
            for part in record["parts"]:  # of inspect's model; a conditional's by its own item if that ran
                day["constants"].update(part.get("constants", {}))
            tell()
            for path in sorted((scratch / "keep").glob("*")):
                if path.stat().st_size < 15_000_000:  # no larger than what a reader would take
                    shutil.move(path, out / path.name)
                else:
                    path.unlink()
            reason = f" ({record['reason']})" if record.get("reason") else ""
            print(f"{item.number}. {item.title}: {record['status']} in {record['seconds']:.0f} s{reason}", flush=True)
        day["finished"] = True
        tell()
    finally:
        if link.is_symlink():
            link.unlink()
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"wrote {out}/gpu_day.json, gpu_day.md in {day['seconds']:.0f} s")
    return 0 if all(item["status"] == children.OK for item in day["items"]) else 1


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
    bad = []
    for part in names.values():
        spent = part["status"] == children.SKIPPED and "the time of its item" in part.get("reason", "")
        if spent or part["status"] not in (children.OK, children.SKIPPED):
            bad.append(part["name"])
    return {
        **record,
        "status": children.OK if not bad else "incomplete",
        "seconds": round(time.monotonic() - began, 1),
        **({"reason": f"went wrong: {', '.join(bad)}"} if bad else {}),
        "parts": parts,
    }


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
    from moe_jax import __version__
    from moe_jax.storage.run_folder import git_state

    state = git_state()
    if state["commit"] is not None:
        return state
    return {**state, "package_version": __version__}


def write(out: pathlib.Path, day: dict) -> None:
    """Write both files, each whole or not at all."""
    record = json.dumps(strict(day), indent=1, allow_nan=False) + "\n"
    for name, text in (("gpu_day.json", record), ("gpu_day.md", page(day))):
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


def page(day: dict) -> str:
    """Return the page: the machine, then one table per item."""
    machine = day["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("jax", "jaxlib", "driver") if machine.get(name))
    commit = day.get("commit") or f"package {day.get('package_version', 'unknown')}"
    if day.get("uncommitted_changes"):
        commit += " with uncommitted changes"
    lines = [
        f"### {machine.get('device_kind', 'unknown device')}, {day['date'][:10]}",
        "",
        f"{versions}; commit {commit}; `{day['command']}`; {day['seconds']:.0f} s"
        + ("" if day["sizes"] == "full" else "; tiny sizes, which say nothing of a GPU")
        + ("" if day["finished"] else "; cut off"),
        "",
    ]
    if day["constants"]:
        fitted = ", ".join(
            f"{name} {value:.2f}" if name.endswith("efficiency") else f"{name} {value * 1e6:.3g} us"
            for name, value in sorted(day["constants"].items())
        )
        lines += [f"Constants for `inspect --constants=gpu_day.json`: {fitted}.", ""]
    for item in day["items"]:
        lines += item_lines(item)
    lines += [
        "#### Prices that no public table has",
        "",
        "| price | low to high | today | what measures it |",
        "|---|---|---|---|",
    ]
    for row in day["assumed"]:
        today = day["constants"].get(row["name"].replace("share", "efficiency"), day["constants"].get(row["name"]))
        said = "not measured" if today is None else f"{today:.3g}"
        lines.append(_cell_row(row["name"], f"{row['low']} to {row['high']} {row['unit']}", said, row["measured_by"]))
    return "\n".join(lines)


def item_lines(item: dict) -> list[str]:
    """Return one item's table."""
    lines = [f"**{item['number']}. {item['title']}** ({item['status']}, {item['seconds']:.0f} s)", ""]
    if not item["parts"]:
        return [*lines, item.get("reason", ""), ""]
    lines += ["| what | result |", "|---|---|"]
    for part in item["parts"]:
        for what, result in part.get("rows", []):
            lines.append(f"| {_cell(what)} | {_cell(result)} |")
        if part["status"] != "ok":
            lines.append(f"| {_cell(part['name'])} | {part['status']}: {_cell(part.get('reason', ''))} |")
    return [*lines, ""]


def _cell_row(*texts: str) -> str:
    return f"| {' | '.join(map(_cell, texts))} |"


def _cell(text: str) -> str:
    return " ".join(str(text).replace("|", "\\|").split())

"""Follow the records of a run while they are written, as few numbers as a picture needs, and the page that draws them.

metrics.jsonl and evaluations.jsonl of a run folder go in, and each byte is read once; lowest, highest and mean value of
equal ranges of steps come out, at most `MOST_POINTS` a line, and the last changes of the plan. So memory and answers
stay small however long a run is. The page is one file: `moe_jax.watch` serves it, a report holds its run's data in it.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import hashlib
import itertools
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.errors import UserError
from moe_jax.observe.metrics_file import column, parse_line, reading
from moe_jax.storage.run_folder import RunFolder

_TEMPLATE = Path(__file__).with_name("watch.html")
MOST_POINTS = 1000  # even: when they are used up, two neighbours become one
MOST_PLANS = 100
BATCH = 4096  # records that are held at a time
LINES = ("loss", "held_out_loss", "tokens_per_second", "grad_norm", "learning_rate", "replicas")
LOAD = "device_load_max_over_mean"
STALLS = ("compile_seconds", "rejit_stall_seconds", "reshard_seconds")


# what is known of each range of steps: how two become one, and what stands where there is none
_PARTS = {"low": (np.fmin, np.nan), "high": (np.fmax, np.nan), "total": (np.add, 0.0), "count": (np.add, 0.0)}


class Decimated:
    """Lowest, highest and mean value of equal ranges of steps, which become twice as wide when there are too many."""

    def __init__(self) -> None:
        self.width, self.last = 1, 0
        self.parts: dict[str, np.ndarray] = {}  # by the names of _PARTS, [MOST_POINTS, layers]; empty at first

    def add(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Take in values [n] or [n, layers] of rising steps [n]; NaN is absent. Rows of another length are left out."""
        if not len(steps):
            return
        rows = values.reshape(len(steps), -1)
        if not self.parts:
            self.parts = {name: np.full((MOST_POINTS, rows.shape[1]), empty) for name, (_, empty) in _PARTS.items()}
        if rows.shape[1] != self.parts["low"].shape[1]:
            return
        while steps[-1] // self.width >= MOST_POINTS:
            self._widen()
        self.last, places = int(steps[-1]), steps // self.width
        starts = np.flatnonzero(np.diff(places, prepend=-1))
        at, present = places[starts], np.isfinite(rows)
        new = {"low": rows, "high": rows, "total": np.where(present, rows, 0.0), "count": present.astype(np.float64)}
        for name, (merge, _) in _PARTS.items():
            self.parts[name][at] = merge(self.parts[name][at], merge.reduceat(new[name], starts))

    def _widen(self) -> None:
        self.width *= 2
        for name, (merge, empty) in _PARTS.items():
            part = self.parts[name]
            self.parts[name] = np.full_like(part, empty)
            self.parts[name][: MOST_POINTS // 2] = merge(part[::2], part[1::2])

    def data(self, *names: str) -> dict[str, Any]:
        """Return {"width", "last": the last step, "steps": first of each range [n], name: [n] or [n, layers]}.

        Args:
          names: some of "low", "high" and "mean"; None stands where no value is finite.
        """
        count = self.parts["count"]
        filled = np.flatnonzero(count.any(axis=1))
        data = {"width": self.width, "last": self.last, "steps": (filled * self.width).tolist()}
        for name in names:
            with np.errstate(invalid="ignore"):
                rows = (self.parts["total"] / count if name == "mean" else self.parts[name])[filled]
            short = [[float(f"{x:.5g}") if x == x else None for x in row] for row in rows.tolist()]
            data[name] = short if rows.shape[1:] != (1,) else [value for (value,) in short]
        return data


class FollowedFile:
    """A jsonl file that grows: each call of `batches` reads what came since the last."""

    def __init__(self, path: Path):
        self.path, self.at, self.last_line, self.last_step = path, 0, b"", -1

    def was_replaced(self) -> bool:
        """Say whether what was read last is not there any more: a run that resumes cuts the lines behind its step."""
        with reading(self.path):
            try:
                with open(self.path, "rb") as file:
                    file.seek(self.at - len(self.last_line))
                    return file.read(len(self.last_line)) != self.last_line
            except FileNotFoundError:
                return self.at > 0

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the new records, at most `BATCH` at a time; a line without its end is left for the next call."""
        with contextlib.suppress(FileNotFoundError), reading(self.path), open(self.path, "rb") as file:
            while True:
                file.seek(self.at)
                lines = [line for line in itertools.islice(file, BATCH) if line.endswith(b"\n")]
                if not lines:
                    return
                records = []
                for line in lines:
                    record = parse_line(line)
                    if record is not None and self.last_step < record["step"]:
                        records.append(record)
                        self.last_step = record["step"]
                self.at, self.last_line = self.at + sum(map(len, lines)), lines[-1]
                yield records


class FollowedRun:
    """What a page shows of one run, brought up to date by `refresh`; threads take turns."""

    def __init__(self, folder: str | os.PathLike[str]):
        """Open a run folder; a UserError where there is none."""
        run = RunFolder(folder, create=False)
        if not run.metrics.exists() and not run.config.exists():
            raise UserError(f"{run.path} is no run folder: it has no metrics.jsonl; give the --workdir of a run")
        self.name, self._run, self._paths = os.fspath(folder), run, (run.metrics, run.evaluations)
        self._lock, self._starts = threading.Lock(), 0
        self._start_over()

    def _start_over(self) -> None:
        self._files, self._starts = [FollowedFile(path) for path in self._paths], self._starts + 1
        self._lines = {name: Decimated() for name in (*LINES, LOAD)}
        self._layers = Decimated()
        self._plans: collections.deque[dict] = collections.deque(maxlen=MOST_PLANS)
        self._changes, self._before = 0, {}

    def refresh(self, seen: str = "") -> dict[str, Any] | None:
        """Read what came, and return what a page draws as plain data; None where its version is `seen`.

        {"version", "name", "written": seconds since 1970 or None, "lines": {name: low, high and mean}, "layers": mean
        load of the fullest device of each layer, over the mean of all, "changes": of the plan, "plans": the last,
        "modelled": what environment.json says of a layer, or None}.
        """
        with self._lock:
            if any(file.was_replaced() for file in self._files):
                self._start_over()
            for file in self._files:
                for records in file.batches():
                    self._take(records)
            version = "-".join(str(number) for number in (self._starts, *(file.at for file in self._files)))
            if version == seen:
                return None
            path = self._paths[0]
            return {
                "version": version,
                "name": self.name,
                "written": path.stat().st_mtime if path.exists() else None,
                "lines": {name: line.data("low", "high", "mean") for name, line in self._lines.items() if line.parts},
                "layers": self._layers.data("mean") if self._layers.parts else None,
                "changes": self._changes,
                "plans": list(self._plans),
                "modelled": self._run.read_environment().get("modelled"),
            }

    def _take(self, records: list[dict[str, Any]]) -> None:
        for name in LINES:
            steps, values = column(records, name)
            if values.ndim == 1:
                self._lines[name].add(steps, values)
        steps, loads = column(records, LOAD)
        if loads.ndim == 2 and loads.size:
            self._layers.add(steps, loads)
            self._lines[LOAD].add(steps, np.fmax.reduce(loads, axis=1))
        for record in records:
            if "plan_id" not in record:
                continue
            before, self._before = self._before, record
            if before and any(before.get(name) != record.get(name) for name in ("plan_id", "replicas")):
                self._changes += 1
                self._plans.append(plan_change(before, record))


def plan_change(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the step of a new plan, {"replicas", "load": of the fullest device} before and now, and its seconds."""

    def sides(record: dict[str, Any]) -> dict[str, Any]:
        loads = column([record], LOAD)[1]
        load = float(np.fmax.reduce(loads, axis=None)) if loads.size else np.nan
        return {"replicas": record.get("replicas"), "load": load if np.isfinite(load) else None}

    seconds = {name: now[name] for name in STALLS if now.get(name)}
    return {"step": now["step"], "before": sides(before), "now": sides(now), "seconds": seconds}


def page_of(data: dict[str, Any] | None = None) -> tuple[str, str]:
    """Return the page and its Content-Security-Policy, which the page also states itself.

    Args:
      data: of one run, as `FollowedRun.refresh` returns it, with "about" as `write_report` adds it; None: the page asks
        its server.
    """
    text = _TEMPLATE.read_text(encoding="utf-8")
    hashes = []
    for name in ("script", "style"):
        inline = re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)[1].encode("utf-8")
        hashes.append(f"{name}-src 'sha256-{base64.b64encode(hashlib.sha256(inline).digest()).decode()}'")
    policy = f"default-src 'none'; {'; '.join(hashes)}; connect-src 'self'; img-src data:"
    policy += "; base-uri 'none'; form-action 'none'"
    embedded = json.dumps(data, allow_nan=False).replace("<", "\\u003c")  # no text ends the element
    return text.replace("POLICY", policy, 1).replace("EMBEDDED", embedded, 1), policy

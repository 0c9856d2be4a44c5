"""Measured times of a recorded trace, put beside the modelled ones, instruction by instruction.

Inputs: spans (device, instruction, begin, end) of some steps, and a report. Outputs: the report with `measured`
records: seconds of a step on the mean device, and of each collective the part during which nothing else computed on its
device. What runs on a device is compared by the names of instructions, which trace and program share.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Span:
    """One execution in a trace: on which device, of which instruction, from when to when (seconds)."""

    device: str
    instruction: str
    begin: float
    end: float


def add_measured(report: dict, spans: Sequence[Span], steps: int) -> dict:
    """Return the report with measured times.

    Args:
      report: from `build_report`.
      spans: of `steps` steps, on any number of devices.
      steps: at least 1.

    Returns:
      A new report: `measured` at its top (seconds of a step by the longest device, of compute, of collectives,
      exposed), and in each collective (None where the trace has no execution of it).
    """
    names = {stem(record["name"]) for record in report["collectives"]}
    devices: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        devices[span.device].append(span)
    share = 1.0 / (max(len(devices), 1) * steps)
    seconds: dict[str, float] = defaultdict(float)
    exposed: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    compute = step = 0.0
    for of_device in devices.values():
        working = merge_spans([(s.begin, s.end) for s in of_device if stem(s.instruction) not in names])
        compute += sum(end - begin for begin, end in working)
        step = max(step, max(s.end for s in of_device) - min(s.begin for s in of_device))
        for span in of_device:
            name = stem(span.instruction)
            if name in names:
                length = span.end - span.begin
                seconds[name] += length
                exposed[name] += length - _covered(working, span.begin, span.end)
                counts[name] += 1
    collectives = []
    for record in report["collectives"]:
        name = stem(record["name"])
        found = None
        if name in counts:
            found = {
                "executions": counts[name] * share,
                "seconds": seconds[name] * share,
                "exposed_seconds": exposed[name] * share,
            }
        collectives.append({**record, "measured": found})
    total = {
        "steps": steps,
        "devices": len(devices),
        "step_seconds": step / steps,
        "compute_seconds": compute * share,
        "collective_seconds": sum(seconds.values()) * share,
        "exposed_seconds": sum(exposed.values()) * share,
    }
    return {**report, "measured": total, "collectives": collectives}


def measured_text(report: dict) -> str:
    """Return modelled and measured seconds side by side as text."""
    total, step = report["measured"], report["step"]
    lines = [
        "",
        f"measured over {total['steps']} steps on {total['devices']} devices, beside the model",
        _ROW.format("", "modelled ms", "measured ms"),
        _row("step", step["modelled_seconds"], total["step_seconds"]),
        _row("compute", step["compute_seconds"], total["compute_seconds"]),
        _row("exposed communication", step["exposed_seconds"], total["exposed_seconds"]),
    ]
    for record in report["collectives"]:
        found = record["measured"]
        if found is None:
            lines.append(f"{record['name']:<44}  not in the trace")
        else:
            lines.append(_row(record["name"], record["seconds"], found["seconds"]))
            lines.append(_row("  of it exposed", record["exposed_seconds"], found["exposed_seconds"]))
    return "\n".join(lines) + "\n"


_ROW = "{:<44} {:>14} {:>14}"


def _row(name: str, modelled: float, measured: float) -> str:
    return _ROW.format(name[:44], f"{modelled * 1e3:.3f}", f"{measured * 1e3:.3f}")


def stem(name: str) -> str:
    """Return the name that start, done and the kernel of one collective share."""
    head, dot, number = name.partition(".")
    return head.removesuffix("-start").removesuffix("-done") + dot + number


def merge_spans(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (begin, end) pairs as the fewest that cover the same time, in order."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _covered(union: list[tuple[float, float]], begin: float, end: float) -> float:
    return sum(max(0.0, min(end, stop) - max(begin, start)) for start, stop in union)
